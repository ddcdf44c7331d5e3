"""A recipe with a tiny model, the real policy of it, and what torch keeps when it really runs."""

from pathlib import Path

import numpy as np
import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group
from torch.distributed.tensor import DTensor

import folders
from surefoot.batch import OutputSpec
from surefoot.data.text.collation import collate
from surefoot.model import outputs
from surefoot.model.numerics import autocast
from surefoot.model.outputs import logprob_head_of
from surefoot.model.tokenizer import load_tokenizer
from surefoot.parallel.world import ALONE
from surefoot.recipe.recipe import read
from surefoot.recipe.recipe_data import open_codec
from surefoot.run.parts import RunParts
from surefoot.run.policy import open_policy
from surefoot.use.estimate._dry_run import build
from surefoot.use.estimate._fake_tensors import HoldingOptions

CPU = torch.device("cpu")


def recipe(folder, kind="llama", *, model=None, changes=None, data=None, **sections):
    sizes = {"num_hidden_layers": 2, **(changes or {})}
    base = folders.save_model(folder / kind, kind, **sizes)
    return read(
        {
            "model": {"path": str(base), **(model or {})},
            "data": {"datasets": ["none"], **(data or {})},
            "stage": "sft",
            "train": {"output_dir": str(folder / "run"), "precision": "fp32"},
            **sections,
        }
    )


def tokenizer(made):
    return load_tokenizer(made.model.path)


def skeleton(made, precision="fp32", dtype=torch.float32, gathered=None, **spread):
    setting = HoldingOptions(
        precision, dtype, gathered, made.model.gradient_checkpointing, **spread
    )
    return build(parts(made), setting)


def parts(made):
    base = Path(made.model.path)
    return RunParts.around(made, open_codec(made, base), base)


def policy(made):
    """The real one, ready to learn."""
    return opened(made).module.train()


def opened(made):
    return open_policy(parts(made), ALONE, needs_start=False)


def features(*lengths, prompt=4, seed=0):
    draw = np.random.default_rng(seed)
    return [
        {
            "input_ids": draw.integers(3, 64, length).tolist(),
            "labels": [-100] * prompt + draw.integers(3, 64, length - prompt).tolist(),
        }
        for length in lengths
    ]


def batch(made, *lengths, prompt=4):
    return collate(features(*lengths, prompt=prompt), packing=made.data.packing)


def head_of(model):
    """The head that training asks."""
    return logprob_head_of(getattr(model, "get_base_model", lambda: model)())


def total(model, micro_batch, head):
    """The sum of log-probabilities, as training computes it."""
    return outputs.compute(model, micro_batch, OutputSpec(("total",)), head=head).total


def kept(model, micro_batch, precision="fp32"):
    """Bytes of unique storages that autograd saves, those of weights left out."""
    own = {t.untyped_storage()._cdata for t in [*model.parameters(), *model.buffers()]}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            saved[storage._cdata] = storage  # kept, so that its number is not given again
        return tensor

    head = head_of(model)
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, autocast(precision, CPU):
        found = total(model, micro_batch, head)
    assert found.requires_grad
    return sum(storage.nbytes() for storage in saved.values())


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def resized(tell, set_attribute=setattr):
    """Let FSDP2 tell of bytes that it gives to and takes from its storages; how many there are."""
    given = [0]

    def changed(function):
        def call(tensor):
            before = tensor.untyped_storage().size()
            function(tensor)
            given[0] += tensor.untyped_storage().size() - before
            tell()

        return call

    for name in ("alloc_storage", "free_storage"):
        told = changed(getattr(_fsdp_param, name))
        for user in (_fsdp_param, _fsdp_param_group):
            set_attribute(user, name, told)
    return given
