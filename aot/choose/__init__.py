"""From times to choices, and the few configs that ship. Uses bundle and measure."""
