"""Interleaved datasets and drawn rows: the same rows in the same order as in LLaMA-Factory."""

import json
from dataclasses import replace
from functools import partial
from itertools import product

import datasets
import numpy as np
import pytest

from surefoot.data.data_order import Mixing, mixed
from surefoot.data.rows.catalog import Catalog
from surefoot.data.rows.rows import ANY
from surefoot.data.section import DataSection
from surefoot.data.training_data import (
    Encoding,
    encode_stream,
    find,
    mixed_rows,
    open_stream,
    prepare,
)

# Rows that _get_merged_dataset of LLaMA-Factory 0.9.5 gives with seed 42 (numpy 2, datasets 5.2),
# for datasets of 12, 7 and 6 rows; "a" has num_samples 5, "b" has 9.
THEIRS = {
    ("concat", None, None): "a10 a9 a0 a8 a5 b0 b6 b3 b1 b4 b5 b2 b1 b3 c0 c1 c2 c3 c4 c5",
    ("concat", None, 4): "a10 a9 a0 a8 b0 b6 b3 b1 c0 c1 c2 c3",
    ("interleave_over", (0.5, 0.3, 0.2), 4): "b0 a10 c0 b6 a9 c1 b3 b1 a0 a8 a10 c2 b0 c3",
    ("interleave_under", (0.2, 0.3, 0.5), None): "c0 b0 c1 c2 a10 c3 c4 c5",
    ("interleave_over", None, None): (
        "a10 b0 c0 a9 b6 c1 a0 b3 c2 a8 b1 c3 a5 b4 c4 a10 b5 c5 a9 b2 c0 a0 b1 c1 a8 b3 c2"
    ),
}
STRATEGIES = ("interleave_under", "interleave_over", "interleave_once")
THEIR_NAMES = ("first_exhausted", "all_exhausted", "all_exhausted_without_replacement")


def encode(examples):
    """One item for each example, which says what it is of; a question with an x gives two."""
    items = []
    for example in examples:
        name, number = example.messages[0].content[0], int(example.messages[0].content[1:])
        item = {"input_ids": [ord(name), number], "labels": [-100, number]}
        items.append([item, item] if example.messages[-1].content == "twice" else [item])
    return items


@pytest.fixture
def section(tmp_path):
    sizes, drawn = {"a": 12, "b": 7, "c": 6}, {"a": 5, "b": 9}
    for name, size in sizes.items():
        rows = [{"instruction": f"{name}{n}", "input": "", "output": "x"} for n in range(size)]
        (tmp_path / f"{name}.json").write_text(json.dumps(rows))
    info = {name: {"file_name": f"{name}.json"} for name in sizes}
    for name, count in drawn.items():
        info[name]["num_samples"] = count
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    return partial(
        DataSection, datasets=("a", "b", "c"), dataset_dir=tmp_path, cache_dir=tmp_path / "cache"
    )


def said(dataset):
    items = (dataset[i]["input_ids"] for i in range(len(dataset)))
    return " ".join(f"{chr(name)}{number}" for name, number in items)


@pytest.mark.parametrize("how", THEIRS, ids=str)
def test_an_epoch_has_the_rows_of_llamafactory_in_its_order(section, how):
    strategy, probabilities, limit = how
    data = section(mix_strategy=strategy, interleave_probs=probabilities, max_samples=limit)
    encoding = Encoding(data, encode, {}, 42)
    assert said(prepare(encoding).train) == THEIRS[how]
    assert said(find(encoding).train) == THEIRS[how], "from the cache, too"


@pytest.mark.parametrize(("ours", "theirs"), list(zip(STRATEGIES, THEIR_NAMES, strict=True)))
@pytest.mark.parametrize("lengths", [(3, 4, 5), (40, 7, 90), (5, 1), (6, 6, 6), (2500, 900)])
def test_interleaving_is_that_of_the_datasets_library(ours, theirs, lengths):
    sources = [
        datasets.Dataset.from_dict({"at": [[d, i] for i in range(n)]})
        for d, n in enumerate(lengths)
    ]
    weights = np.arange(1, len(lengths) + 1)
    for probabilities, seed in product((None, tuple(weights / weights.sum())), (0, 7)):
        found = datasets.interleave_datasets(
            sources, probabilities=probabilities, seed=seed, stopping_strategy=theirs
        )
        which, rows = mixed(Mixing(ours, probabilities, seed), lengths)
        assert np.stack([which, rows], 1).tolist() == found["at"][:]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("probabilities", [None, (0.2, 0.3, 0.5)])
def test_a_stream_has_the_same_order(section, strategy, probabilities):
    mixing = Mixing(strategy, probabilities, 3)
    data = section(mix_strategy=strategy, interleave_probs=probabilities, streaming=True)
    entries = Catalog(data).entries
    found = [row.origin.split(":") for row in mixed_rows(mixing, entries, data, ANY)]
    which, rows = mixed(mixing, (5, 7, 6))  # of a stream, num_samples takes the first rows
    assert [("abc".index(n), int(i)) for n, i in found] == list(zip(which, rows, strict=True))


def test_a_stream_is_encoded_in_that_order_and_resumed(section):
    data = section(mix_strategy="interleave_over", streaming=True, shuffle=False)
    encoding = Encoding(data, encode, {}, 42)
    reports = encode_stream(encoding, shard_rows=5)
    stream = open_stream(encoding, partial(next, reports, None)).train
    assert stream.reach(100) == 21
    whole = [stream[i]["input_ids"].tolist() for i in range(21)]
    assert "".join(chr(name) for name, _ in whole) == "abc" * 7
    killed = replace(encoding, section=replace(data, cache_dir=data.cache_dir / "other"))
    next(encode_stream(killed, shard_rows=5))
    again = open_stream(killed, partial(next, encode_stream(killed, shard_rows=5), None)).train
    again.reach(100)
    assert [again[i]["input_ids"].tolist() for i in range(21)] == whole


def test_a_held_out_row_is_never_trained_on_however_often_it_is_drawn(section):
    data = section(mix_strategy="interleave_over", val_size=4)
    found = prepare(Encoding(data, encode, {}, 42))
    held, trained = set(said(found.evals[""]).split()), set(said(found.train).split())
    assert len(held) == len(found.evals[""]) == 4
    assert not held & trained


def test_a_row_with_two_items_is_interleaved_as_one_row(section, tmp_path):
    rows = [{"instruction": f"a{n}", "output": "twice" if n else "x"} for n in range(3)]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    (tmp_path / "dataset_info.json").write_text(
        json.dumps({name: {"file_name": f"{name}.json"} for name in "abc"})
    )
    data = section(mix_strategy="interleave_under", datasets=("a", "c"))
    assert said(prepare(Encoding(data, encode, {}, 1)).train) == "a0 c0 a1 a1 c1 a2 a2 c2"


def test_rows_drawn_for_another_seed_are_other_rows(section):
    first, second = (said(prepare(Encoding(section(), encode, {}, seed)).train) for seed in (1, 2))
    assert len(first.split()) == len(second.split())
    assert set(first.split()) != set(second.split())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"interleave_probs": (0.5, 0.3, 0.2)}, "interleave_probs needs a mix_strategy"),
        ({"interleave_probs": (0.5, 0.5)}, "expected 3 numbers, one for each of datasets, got 2"),
        ({"interleave_probs": (0.5, 0.3, 0.3)}, "which sum to 1.1"),
        ({"interleave_probs": (0.5, 0.5, 0.0)}, "expected positive numbers that sum to 1"),
        ({"streaming": True, "val_size": 2}, "val_size with streaming needs mix_strategy concat"),
    ],
)
def test_what_cannot_be_mixed_is_refused(section, changes, reason):
    strategy = "concat" if "needs a mix" in reason else "interleave_over"
    with pytest.raises(ValueError, match=reason):
        section(mix_strategy=strategy, **changes)
