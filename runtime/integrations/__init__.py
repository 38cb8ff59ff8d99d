"""Engines and libraries that run on pretuned: a room each, which none imports its engine before it is asked.

A room's ``__init__.py`` is what users and entry points import. Uses pretuned.runtime.
"""
