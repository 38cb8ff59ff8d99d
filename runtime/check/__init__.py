"""Checks of a call's tensors, flags and saved tensors. Uses the driver's device."""
