"""Files to examples: sources, readers, the registry of datasets, formats."""
