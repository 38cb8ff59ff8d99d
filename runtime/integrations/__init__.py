"""Engines and libraries that can run on pretuned, one folder each. No folder imports its engine at import.

Users and entry points import a folder's ``__init__.py``. Uses pretuned.runtime.
"""

ENGINES = ("vllm", "sglang")  # the folders with a PLUG_IN, which the engine finds by an entry point in pyproject.toml
