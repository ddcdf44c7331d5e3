"""A model that computes what a stage specifies, and how it is trained."""
