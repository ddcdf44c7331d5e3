"""How fast a recipe trains here: a few of its own optimizer steps, timed, and the same with other
settings.

What is measured is what ``surefoot train`` runs, by the same ``build`` and the same loop; only
reports, evaluations and saves are left out. Each measurement has a process of its own.
"""
