"""The CUDA driver through ctypes: device, modules, descriptors, and the one launcher.

Uses artifacts and kernels' contract.
"""
