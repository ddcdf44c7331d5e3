"""The recipe: one YAML file, one frozen tree of sections."""
