"""What is measured next, and what is done when a GPU is lost. Uses choose and measure."""
