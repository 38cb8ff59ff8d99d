"""Quantised weights of experts: what codes and scales say, how checkpoints pack them. Uses the records alone."""
