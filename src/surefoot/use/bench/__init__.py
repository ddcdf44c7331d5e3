"""How fast a recipe trains on this machine: a few of its own optimizer steps, timed, and the same
with other settings.

The measured code is that of ``surefoot train``, with the same ``build`` and the same loop; only
logs, evaluations and saves are omitted. Each measurement has a process of its own.
"""
