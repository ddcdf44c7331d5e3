"""A model made ready: loaded, adapted, sharded, and run to the outputs that a stage needs."""
