"""LLaMA-Factory's, TRL's, axolotl's and transformers' files as recipes.

``importers`` says whose a file is, and hands it to ``conversion``: the arguments are read by their
types (``arguments.yaml``), those of other trainers are renamed as LLaMA-Factory's
(``other_trainers``), and rules make settings of them (``rules.yaml``, and where no row can say it,
``llamafactory`` and ``optimizer_arguments``). Each argument becomes a setting, has no effect, or is
refused with what to write instead; differences are listed. ``run_extras`` is what a file of
LLaMA-Factory requests of a run beside its recipe, ``commands`` LLaMA-Factory's command lines. The
door is ``plugin``.
"""
