"""Variants to cubins, in worker processes that may abort. Uses process."""
