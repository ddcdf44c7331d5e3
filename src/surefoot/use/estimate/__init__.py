"""Estimates of a run before anything is loaded: a dry run of one step on fake tensors.

The model is built from its ``config.json`` and runs one step on fake tensors, which have a shape, a
dtype and a lifetime, but no values. The memory that they would need is counted; no formula for an
architecture has to be maintained.
"""
