"""GPU architectures and products: tables of published figures. Uses artifacts' records."""
