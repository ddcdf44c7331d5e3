"""Weights in the forms of MindSpore and MindSpore Transformers: full, by rank, and by iteration.

``slicing`` is the arithmetic of their slices, ``strategy`` the files that describe them, ``ranks``
finds files that belong together, and ``opened`` opens a folder of any of the forms.
"""
