"""The nouns that every layer shares, as named tuples. Uses only the standard library and limits."""
