"""Weights as MindSpore and MindSpore Transformers keep them: whole, by rank, and by iteration.

``slicing`` is the arithmetic of their slices, ``strategy`` the files that describe them, ``ranks``
finds what belongs together, and ``opened`` opens a folder of any of the forms.
"""
