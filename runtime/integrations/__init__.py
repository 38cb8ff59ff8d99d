"""Engines and libraries that run on pretuned: one file each, none imports its engine before it is asked.

Uses pretuned.runtime.
"""
