"""When to log, evaluate, save and stop."""
