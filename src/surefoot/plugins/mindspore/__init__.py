"""Weights in the forms of MindSpore and MindSpore Transformers: full, by rank, and by iteration.

``strategy`` is the arithmetic of their slices and the files that describe them, ``ranks`` finds
files that belong together, and ``opening`` opens a folder of any of the forms.
"""
