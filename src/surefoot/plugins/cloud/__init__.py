"""Runs in object stores, and models on hubs.

A run in a store works in a local folder. Before it begins, ``remote_run`` finds the checkpoint to
resume from, here or there; while it trains, ``mirror`` uploads what is saved, in a process of its
own, and deletes there what the run deletes. ``checkpoints`` is what both do with one checkpoint,
and ``store`` has every call of fsspec.

Models and datasets come from hubs through ``hubs``. ``surefoot push`` (``command``) and a run
that uploads itself (``publisher``) both go through ``pushing``: ``contents`` says which files,
without secrets, ``run.card`` describes them, and the difference to the repository is one commit.
"""
