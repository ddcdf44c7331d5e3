"""Save states: prepare, plan which rank writes what, write, commit."""
