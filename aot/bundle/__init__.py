"""Bundles assembled, merged, compared, pruned, signed and verified. Uses plan and journal."""
