"""Readers of compiled cubins and of kernel sources. Uses records."""
