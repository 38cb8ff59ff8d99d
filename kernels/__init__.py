"""The GPU kernels: a folder for each family of kernels, and the modules that all of them share.

A folder's ``__init__.py`` declares its kernels' entries: supported dtypes and fusions, arguments, configs to try. Its
``cost.py`` estimates their times. The folder's other files are the Triton or Gluon source; only they import Triton.
``reference`` computes the same results in plain torch. ``registry`` lists all entries.
"""
