"""MindSpore and MindSpore Transformers: their weights, runs and YAML files, in both directions.

To read: ``opening`` opens a folder in any of three forms as boxes in files. ``ranks`` finds the
files of one step, ``strategy`` says which slice each rank has, ``iteration`` has the two forms that
need no strategy. ``naming`` and ``experts`` give the tensors Hugging Face's names, and ``model``
puts all of it together; ``resume`` resumes a run, ``recipe`` converts its YAML.

To write: ``writing`` is the target of ``ckpt convert``, ``strategy`` says how tensors are
sliced.
"""
