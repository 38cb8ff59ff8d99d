"""The cost model: the time of a variant for a problem and rows, estimated. Uses the contract."""
