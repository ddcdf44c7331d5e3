"""Packed rows of models with a state, beside padded ones: forward and backward of 32 documents.

    .venv/bin/python benchmarks/hybrids.py [--repetitions 5] [--kinds lfm2 mamba2] [--draws 0]

Models of random weights (width 128, the layers of a tiny one) in float32, one thread, in turns:
the same documents packed in one row, and padded, sorted by length, in batches of 8, as a recipe
without packing has them. Lengths are mixed (median 55, some over 200) or short (median 20). CPU
seconds; a ratio above 1 says that packed rows need less.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from measure import interleaved, machine, ratio, say, spread, table
from transformers import PreTrainedModel

from surefoot.model.isolation import unpacked, use_packed
from surefoot.model.packed_attention import packed_arguments

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from zoo import architectures

SIZES = {"hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": 1024}
HEADS = {"num_heads": 8, "head_dim": 32, "chunk_size": 64}
CHANGES = {  # with real work in a layer, and chunks as long as the documents
    "mamba2": HEADS,
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_chunk_size": 64},
    "zamba2": {"hidden_size": 32, "intermediate_size": 48},  # its own
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_chunk_size": 64},
}
KINDS = ("lfm2", "lfm2_moe", "qwen3_5_text", "qwen3_next", "mamba", "mamba2", "falcon_mamba")
KINDS += ("bamba", "falcon_h1", "granitemoehybrid", "jamba", "minimax", "nemotron_h", "zamba2")
KINDS += ("recurrent_gemma",)
MEDIANS = {"mixed": (4.0, 0.7), "short": (3.0, 0.4)}  # of the logarithm, and its deviation
Documents = Sequence[torch.Tensor]


def model_of(kind: str) -> PreTrainedModel:
    """A model with the layers of its tiny one, but wider."""
    return architectures.build(kind, **{**SIZES, **CHANGES.get(kind, {})}).train()


def documents(lengths: str, draw: int) -> Documents:
    """32 documents of random tokens."""
    generator = torch.Generator().manual_seed(draw)
    mean, deviation = MEDIANS[lengths]
    counts = (torch.randn(32, generator=generator) * deviation + mean).exp().int().clamp(4, 300)
    return [torch.randint(3, 60, (int(n),), generator=generator) for n in counts]


def learn_packed(model: PreTrainedModel, rows: Documents) -> None:
    """The gradient of all of them in one row."""
    bounds = torch.tensor([0, *map(len, rows)]).cumsum(0).int()
    ids, positions = torch.cat(list(rows)), torch.cat([torch.arange(len(row)) for row in rows])
    labels = ids.clone()
    labels[bounds[:-1].long()] = -100
    arguments = packed_arguments(model, bounds)
    logits = model(input_ids=ids[None], position_ids=positions[None], use_cache=False, **arguments)
    backward(logits.logits[0, :-1], labels[1:])


def learn_padded(model: PreTrainedModel, rows: Documents, size: int = 8) -> None:
    """The same of padded batches of ``size``, sorted by length."""
    ordered = sorted(rows, key=len)
    with unpacked(model):
        for start in range(0, len(ordered), size):
            group = ordered[start : start + size]
            ids = torch.nn.utils.rnn.pad_sequence(group, batch_first=True)
            mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(r) for r in group], True)
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
            labels = ids.masked_fill(mask == 0, -100)[:, 1:]
            backward(logits[:, :-1].flatten(0, 1), labels.flatten())


def backward(logits: torch.Tensor, labels: torch.Tensor) -> None:
    """Of the sum of all losses."""
    F.cross_entropy(logits, labels, reduction="sum").backward()


def seconds(model: PreTrainedModel, learn: Callable[[], None]) -> float:
    """CPU seconds of one gradient."""
    model.zero_grad(set_to_none=True)
    start = time.process_time()
    learn()
    return time.process_time() - start


def main() -> None:
    """Print a row for each kind and lengths."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--kinds", nargs="+", default=KINDS)
    parser.add_argument("--draws", type=int, default=0, help="seed of the documents")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = []
    for kind in arguments.kinds:
        model = model_of(kind)
        use_packed(model, 300)
        for lengths in MEDIANS:
            drawn = documents(lengths, arguments.draws)
            subjects = {
                "packed": partial(learn_packed, model, drawn),
                "padded": partial(learn_padded, model, drawn),
            }
            for learn in subjects.values():
                learn()
            found: dict[str, list[float]] = {name: [] for name in subjects}
            for name in interleaved([*subjects], arguments.repetitions):
                found[name].append(seconds(model, subjects[name]))
            packed, padded = found.values()
            rows.append([kind, lengths, spread(packed), spread(padded), ratio(packed, padded)])
            say(" ".join(rows[-1]))
    print(machine(), "\n")
    print(table(["model", "lengths", "packed, s", "padded and sorted, s", "ratio"], rows))


if __name__ == "__main__":
    main()
