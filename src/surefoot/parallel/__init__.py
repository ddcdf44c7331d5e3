"""How ranks share a model and its data: the mesh, their parts of tensors, and what they send.

``section`` is what the recipe says, ``launcher`` starts the ranks of one machine, as forks of a
``fork_server``; ``world`` is the process group as one of them sees it. ``sharding`` says, as plain
numbers, which part of a tensor a rank has; checkpoints use them without torch. ``sharded_model``
shards a model: matrices over ``tp`` by the plan of ``tp_plan`` and the forward passes of
``tensor_parallel``, logits by ``vocab_parallel``, then all weights by FSDP2. ``pipeline`` runs a
window through the stages of several ranks. Gradients are sums over ranks: the training step divides
once.
"""
