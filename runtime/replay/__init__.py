"""A call like an earlier one again, without checks. Uses ops."""
