"""The functions that users call. Uses everything below."""
