"""How much of their time ranks work, and how much they wait for the one with the heaviest pass.

    .venv/bin/python benchmarks/dealing.py [--data ../shared/data] [--repetitions 5]

Nothing is trained: time is counted in the positions that are computed, and all ranks wait for each
other in every pass, as sharded ones do. Each dataset is encoded with a tokenizer of its own texts.
`busy` is the share of that time in which tokens are computed, padding not counted; `largest` is the
largest pass of a rank, which memory is for, in positions.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
from inputs import make_model
from measure import say

from surefoot.data.data_order import Index, permutation
from surefoot.data.order.micro_batches import balance_by_length, num_passes, positions
from surefoot.data.section import DataSection
from surefoot.data.text.codec import Codec
from surefoot.data.text.templates import load_template
from surefoot.data.training_data import Encoding, prepare
from surefoot.model.tokenizer import load_tokenizer
from surefoot.stages._pt import PT
from surefoot.stages._sft import SFT

DATASETS = {
    "alpaca_en_demo": SFT(),
    "glaive_toolcall_en_demo": SFT(),
    "c4_demo": PT(),
}
MICRO_BATCH_SIZE = 4
SHAPES = ((1, 4), (2, 1), (4, 1), (8, 1), (8, 4), (64, 1))  # ranks, passes of each in a step


def lengths_of(name: str, stage: object, data: Path, folder: Path) -> Index:
    """Tokens of each example."""
    section = DataSection(
        datasets=(name,), dataset_dir=data, template="chatml", cutoff_len=2048, cache_dir=folder
    )
    tokenizer = load_tokenizer(folder)
    codec = Codec(tokenizer, load_template(section.template, tokenizer), section)
    fingerprint = {"codec": codec.fingerprint, "stage": type(stage).__name__}
    encode = partial(stage.encode, codec=codec)
    return prepare(Encoding(section, encode, fingerprint, 42)).train.lengths


def figures(lengths: Index, ranks: int, passes: int, epochs: int, *, packing: bool) -> list[str]:
    """Busy shares by number and dealt, then the largest pass of both."""
    size = MICRO_BATCH_SIZE * ranks * passes
    orders = [permutation(len(lengths), seed=42, stream=epoch) for epoch in range(epochs)]
    windows = np.concatenate(
        [lengths[order[: len(order) // size * size]].reshape(-1, size) for order in orders]
    )
    count = num_passes(size, MICRO_BATCH_SIZE, ranks)
    by_number = np.broadcast_to(np.repeat(np.arange(count), MICRO_BATCH_SIZE), windows.shape)
    dealt = balance_by_length(
        windows, micro_batch_size=MICRO_BATCH_SIZE, world_size=ranks, packing=packing
    )
    laid_out = [positions(windows, groups, count, packing=packing) for groups in (by_number, dealt)]
    spent = [each.reshape(-1, ranks).max(1).sum() * ranks for each in laid_out]
    return [f"{windows.sum() / time:.2f}" for time in spent] + [
        f"{each.max():,}" for each in laid_out
    ]


def main() -> None:
    """Encode, deal, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    shared = Path(__file__).parents[2] / "shared" / "data"
    parser.add_argument("--data", type=Path, default=shared)
    parser.add_argument("--repetitions", type=int, default=5, help="epochs, each in another order")
    given = parser.parse_args()
    heads = ("busy by number", "dealt", "largest by number", "dealt")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder, [{"instruction": text, "output": ""} for text in _texts(given.data)])
        for packing in (True, False):
            say(f"\n{'packed' if packing else 'padded'}, {MICRO_BATCH_SIZE} examples a pass\n")
            say(f"| dataset | ranks x passes | {' | '.join(heads)} |\n{'| --- ' * 6}|")
            for dataset, stage in DATASETS.items():
                lengths = lengths_of(dataset, stage, given.data, folder)
                for ranks, passes in SHAPES:
                    if MICRO_BATCH_SIZE * ranks * passes <= len(lengths):
                        row = figures(lengths, ranks, passes, given.repetitions, packing=packing)
                        say(f"| {dataset} | {ranks} x {passes} | {' | '.join(row)} |")


def _texts(data: Path) -> list[str]:
    """Of all files, for the tokenizer."""
    files = [path for path in data.iterdir() if path.stem in DATASETS]
    return [line for path in files for line in path.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    main()
