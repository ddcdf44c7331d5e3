"""Update rules of our own: each optimizer one file, on each rank's part of a parameter."""
