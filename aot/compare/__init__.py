"""Compare pretuned with other libraries on one GPU, in one process: check each against fp32, then time in turns."""
