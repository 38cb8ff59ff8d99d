"""Engines and libraries that run on pretuned, a folder each. None imports its engine before it is asked for.

Users and entry points import a folder's ``__init__.py``. Uses pretuned.runtime.
"""

ENGINES = ("vllm", "sglang")  # folders with a PLUG_IN, of engines that find it by an entry point of pyproject.toml
