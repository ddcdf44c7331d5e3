"""Save while training goes on: a snapshot in memory, and a process that writes it."""
