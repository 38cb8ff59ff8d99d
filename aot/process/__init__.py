"""Processes, scratch folders, output files, and the GPUs of this machine. Uses artifacts' errors."""
