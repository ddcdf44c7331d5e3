"""What runs have, save, and go on from: all of it by name, to be compared to the bit.

Whole tensors come from torch's own gather (``full_tensor``), never from our boxes.
"""

import numpy as np
import torch
from peft import PeftModel
from torch.distributed.tensor import DTensor

import tiny
from spread import learn, resume, save, trainer
from surefoot.checkpoint.disk.folder import open_checkpoint


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def everything(made):
    """All weights and moments that this rank has, or has a part of, whole, by name."""
    found = {f"model/{name}": t for name, t in made.policy.weights.state_dict().items()}
    for name, slots in made.policy.optimizer_state.state_dict().items():
        found |= {f"{name}/{slot}": torch.as_tensor(t) for slot, t in slots.items()}
    return {name: whole(tensor) for name, tensor in found.items() if not tensor.is_meta}


def start(world, folder, steps=2, **changes):
    """Learn, save; the checkpoint, what is in it, and the losses so far."""
    made = trainer(world, folder, **changes)
    losses = learn(made, steps)
    return save(made, folder), everything(made), losses


def go_on(world, folder, saved, steps=0, **changes):
    made = resume(trainer(world, folder, **changes), saved)
    found = everything(made)
    losses = learn(made, steps)
    return save(made, folder) if steps else None, found, losses


def assert_bitwise(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def assert_written_once(saved):
    """Every element of every tensor is in one piece, no more."""
    manifest = open_checkpoint(saved).manifest
    for role in ("model", "optimizer"):
        for name, pieces in manifest.tensors(role).items():
            count = np.zeros(pieces.shape, int)
            for piece in pieces:
                box = piece.box
                ends = [a + n for a, n in zip(box.start, box.shape, strict=True)]
                count[tuple(map(slice, box.start, ends))] += 1
            assert (count == 1).all(), name


def together(parts):
    """What all ranks have; of what several have, the same bits."""
    found = {}
    for part in parts:
        both = part.keys() & found.keys()
        assert_bitwise({name: part[name] for name in both}, {name: found[name] for name in both})
        found |= part
    return found


def assert_peft_opens(made, saved, **sizes):
    """PEFT gives the logits of ``made`` from the adapter of its checkpoint alone."""
    made.policy.module.peft_config["default"].save_pretrained(saved)
    opened = PeftModel.from_pretrained(tiny.model(**sizes), saved).eval()
    ids = torch.arange(3, 20)[None]
    ours = made.policy.module.eval()(ids).logits
    torch.testing.assert_close(opened(ids).logits, ours, rtol=0, atol=1e-5)
