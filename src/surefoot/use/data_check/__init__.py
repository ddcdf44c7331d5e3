"""A check of a recipe's rows before training: lengths, duplicates, overlap, odd conversations."""
