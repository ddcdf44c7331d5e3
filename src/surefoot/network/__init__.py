"""Networks: models that are loaded, adapted, sharded, and run to the outputs that a stage needs."""
