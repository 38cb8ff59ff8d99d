"""Bundles made, merged, compared, cut down and verified. Uses plan and journal."""
