"""Runs on machines of an engine: Ray, SLURM, Kubernetes, SkyPilot.

``command`` checks the recipe with every number of ranks that it may get (``request``), before an
engine is involved. ``slurm``, ``kubernetes`` and ``skypilot`` are each one function from a request
to a document, which the engine's own program runs. Ray has no document: ``on_ray`` runs the ranks.
No engine is imported, or needs to be installed, before it is named.
"""
