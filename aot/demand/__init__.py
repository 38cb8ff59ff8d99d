"""Tuning and compiling on demand, for a process that runs. Uses tune."""
