"""A run: from a recipe to a trained model, and from an interrupted launch to the next.

``training_run.train`` is the door from Python, ``training_run.run`` that of ``surefoot train``.
A run is ``resolving.resolved`` (what the recipe names is found), ``new_weights`` (a base that is
initialized), ``folder.opened`` (one process a
folder, and the checkpoint to resume from), ``_launch.recorded`` and ``assembly.build``, which makes
the Trainer of its parts: ``_data_loading`` (examples), ``models`` (bases and auxiliary models),
``policy`` (what is trained), ``contexts`` (columns computed before the first step, and how the
policy is measured). ``foreign_resume`` is the seam for other trainers' checkpoints, ``from_python``
what a program gives in place of names, ``code_files`` the functions that a recipe names.
``surroundings`` is what each launch records, ``rows_record`` a hash of each row; ``replay``
computes steps of a run again, and ``fork`` continues one from any step.
"""
