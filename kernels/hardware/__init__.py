"""Tables of published figures: GPU architectures (``arch``) and products (``chips``). Uses artifacts' records."""
