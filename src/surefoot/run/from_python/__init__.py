"""Objects that a program gives to ``surefoot.train``: rows, a model, a tokenizer, a loss."""
