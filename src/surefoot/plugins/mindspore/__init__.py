"""MindSpore and MindSpore Transformers: their weights, runs and YAML files, in both directions.

To read: ``opening`` opens a folder in any of three forms as boxes in files. ``ranks`` finds the
files of one step, ``strategy`` reads which slice each rank has (a ``tensor_layout``), ``iteration``
has the two forms that need no strategy. ``naming`` and ``experts`` give the tensors Hugging Face's
names, and ``model`` puts all of it together; ``resume`` resumes a run, ``recipe`` converts its
YAML.

To write: ``target`` is that of ``ckpt convert``, and ``writing`` writes its three forms;
``tensor_layout`` has the layouts of a ``parallel_config``, and ``strategy`` writes those of each
rank.
"""
