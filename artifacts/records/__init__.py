"""The nouns that every layer shares, as frozen dataclasses. Uses only the standard library and limits."""
