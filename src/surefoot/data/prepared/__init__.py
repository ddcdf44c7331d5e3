"""From the recipe's ``data`` section to what a run trains on and is evaluated on."""
