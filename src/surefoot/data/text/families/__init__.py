"""Chat templates of model families: a table of their texts, written as Jinja when they are used."""
