"""Named tuples and enums that all layers share: Problem, Variant, Choice, ... Uses only the standard library."""
