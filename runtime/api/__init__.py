"""What users call. Uses everything below."""
