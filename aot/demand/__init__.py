"""Tune and compile on demand, for a running process. Uses tune."""
