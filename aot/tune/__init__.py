"""Schedule measurements, and go on when a GPU is lost. Uses choose and measure."""
