"""Files to examples: row sources, readers, the registry of datasets, formats."""
