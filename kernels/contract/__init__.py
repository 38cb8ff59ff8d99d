"""The contract of compiler and launcher, in plain Python: configs, arguments, what each kernel has code for.

No torch, no Triton.
"""
