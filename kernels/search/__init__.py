"""Which configs are worth compiling, by generation. Uses the contract."""
