"""Ours beside other libraries on one GPU, in one process, in turns: each judged against fp32 first, then timed."""
