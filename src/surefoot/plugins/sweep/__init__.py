"""Search for better settings: trials of a recipe, each an ordinary run, and the best of them."""
