"""Search for better settings: trials of a recipe, each an ordinary run, and the best of them.

``command`` reads the ranges as a ``space`` and chooses the ``objective``. ``sweep`` starts trials,
follows their logs and ends bad ones early. What it knows is in a ``study``, which is optuna's: a
trial is in it, with all its values, before its run begins, so that a killed sweep continues.
"""
