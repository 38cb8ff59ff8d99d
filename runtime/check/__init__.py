"""Is a call right? Its tensors, its form, its operands. Uses the driver's device."""
