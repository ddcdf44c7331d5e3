"""What a run will take, before anything is loaded: the run is rehearsed on tensors without memory.

The model is built from its ``config.json`` and runs one step on fake tensors, which have a shape, a
type and a lifetime, but no values. What they would have taken is counted; no formula for an
architecture has to be kept up to date.
"""
