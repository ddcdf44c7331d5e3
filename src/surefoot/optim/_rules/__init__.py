"""What update rules are made of: the optimizer around a rule, and its arithmetic."""
