"""The rows as tokens, made once, for trainers that are given tokens."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from datasets import Dataset

from surefoot.data.section import DataSection
from surefoot.data.text.codec import Codec
from surefoot.data.text.templates import load_template
from surefoot.data.training_data import Encoding, prepare
from surefoot.model.tokenizer import load_tokenizer
from surefoot.stages._sft import SFT


def tokenize(folder: Path, *, cutoff_len: int) -> None:
    """``tokenized`` beside the rows: ids and labels as Surefoot makes them, a dataset on disk."""
    section = DataSection(
        datasets=("rows",), dataset_dir=folder, template="chatml", cutoff_len=cutoff_len
    )
    tokenizer = load_tokenizer(folder)
    codec = Codec(tokenizer, load_template(section.template, tokenizer), section)
    encode = partial(SFT().encode, codec=codec)
    found = prepare(Encoding(section, encode, {"codec": codec.fingerprint}, 42)).train
    rows = [found[index] for index in range(len(found))]
    columns = {name: [list(row[name]) for row in rows] for name in ("input_ids", "labels")}
    columns["attention_mask"] = [[1] * len(ids) for ids in columns["input_ids"]]
    Dataset.from_dict(columns).save_to_disk(folder / "tokenized")
