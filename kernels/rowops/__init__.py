"""Kernels of the row operations around the products: no product, any number of rows and columns."""
