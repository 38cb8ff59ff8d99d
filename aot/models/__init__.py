"""From a line of models.txt to the shapes of its experts. Uses artifacts' records."""
