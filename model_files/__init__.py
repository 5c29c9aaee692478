"""Where a model is and what its files say. Loads no torch."""
