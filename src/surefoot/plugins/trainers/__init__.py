"""Resume runs of Hugging Face's Trainer, and convert runs for it; weights of DCP and DeepSpeed.

``from_trainer`` loads a checkpoint of the Trainer into a run, ``to_trainer`` writes one;
``trainer_folder`` is what both know of its files. ``callback`` has Surefoot checkpoints in the
Trainer itself. ``pickled_weights`` reads models of PyTorch's DCP and of DeepSpeed. The Trainer
stores its training state in pickles. Only ``pickles`` opens them, as tensors, plain values and
inert records, and only with the user's consent. The doors are ``plugin`` and ``callback``.
"""
