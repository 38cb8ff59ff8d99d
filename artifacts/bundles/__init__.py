"""The bundles that ship in the wheel."""
