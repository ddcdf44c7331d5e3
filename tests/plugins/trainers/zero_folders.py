"""Folders as DeepSpeed 0.19 writes them: all that is read of them, from whole tensors."""

import math
from collections import OrderedDict

import torch


class LossScaler:
    """Stands for what DeepSpeed and its users pickle beside the weights."""

    def __init__(self):
        self.scale = 1.0


class Kind(dict):
    """A dict of their own."""


def model_state(tensors, groups, *, shared=(), frozen=(), stage=2, rank=0, ranks=1):
    """What ``mp_rank_00_model_states.pt`` says, or that of a rank of ZeRO 3."""
    learned = {name for group in groups for name in group}
    buffers = [n for n in tensors if n not in learned and n not in frozen]
    module = OrderedDict(tensors)
    module._metadata = {"": {"version": 1}}  # as ``state_dict`` has it
    if stage == 3:
        module = {n: tensors[n] if n in buffers else torch.empty(0) for n in tensors}
    for alias, name in shared:
        module[alias] = module[name]
    cut = {n: share(tensors[n], rank, ranks) if stage == 3 else tensors[n] for n in frozen}
    return {
        "module": module,
        "buffer_names": buffers,
        "param_shapes": [OrderedDict((n, tensors[n].shape) for n in group) for group in groups],
        "frozen_param_shapes": {n: tensors[n].shape for n in frozen} if stage > 1 else None,
        "frozen_param_fragments": cut if stage > 1 else None,
        "shared_params": dict(shared),
        "global_steps": 3,
        "their_own": [LossScaler(), Kind(a={1, 2}), torch.Generator],
    }


def share(tensor, rank, ranks):
    """The part of a rank in ZeRO 3, the last ones filled up."""
    size = math.ceil(tensor.numel() / ranks)
    flat = tensor.flatten().float() if tensor.dtype == torch.float64 else tensor.flatten()
    padded = torch.cat([flat, flat.new_zeros(size * ranks - flat.numel())])
    return padded[rank * size : (rank + 1) * size].clone()


def write_zero(folder, tensors, groups, *, stage, ranks, tag="global_step3", **options):
    """A checkpoint of ``ranks`` processes; ``groups`` name what learns."""
    place = folder / tag
    place.mkdir(parents=True)
    (folder / "latest").write_text(tag)
    for rank in range(ranks):
        name = f"zero_pp_rank_{rank}_mp_rank_00" if stage == 3 else "mp_rank_00"
        if stage == 3 or rank == 0:
            state = model_state(tensors, groups, stage=stage, rank=rank, ranks=ranks, **options)
            torch.save(state, place / f"{name}_model_states.pt")
        told = flat_by_rank if stage == 3 else flat_by_group
        optimizer = {
            "zero_stage": stage,
            "loss_scaler": LossScaler(),
            **told(tensors, groups, rank, ranks),
        }
        path = place / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": optimizer}, path)
    return place


def flat_by_group(tensors, groups, rank, ranks):
    """ZeRO 1 and 2: groups end to end, filled up, and cut; the fill is not saved."""
    parts, fills = [], []
    for group in groups:
        flat = torch.cat([tensors[name].flatten().float() for name in group])
        fill = -len(flat) % (2 * ranks)
        size = (len(flat) + fill) // ranks
        parts.append(flat[rank * size : (rank + 1) * size].clone())
        fills.append([0] * len(group))
    return {
        "single_partition_of_fp32_groups": parts,
        "partition_count": [ranks] * len(groups),
        "param_alignment_paddings": fills,
    }


def flat_by_rank(tensors, groups, rank, ranks):
    """ZeRO 3: a part of every parameter, end to end, in groups that follow no tensor's bounds."""
    names = [name for group in groups for name in group]
    flat = torch.cat([share(tensors[name].float(), rank, ranks) for name in names])
    parts = [flat[:7].clone(), torch.nn.Parameter(flat[7:9].clone()), flat[9:].clone()]
    parts[0].ds_id = parts[1].ds_id = 3  # as theirs: pickled as something around a tensor
    parts[2] = torch.nn.Parameter(parts[2])
    return {"fp32_flat_groups": parts, "partition_count": ranks}
