"""What is computed: a folder for each kernel, and what they share.

A folder's ``__init__.py`` declares its kernels: what they support, their arguments, the configs to try. ``cost.py`` has
its cost terms. The other files are the source, which alone imports Triton; ``reference`` is the same in torch.
"""
