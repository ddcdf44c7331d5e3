"""Save states: prepare, plan who writes what, write, commit."""
