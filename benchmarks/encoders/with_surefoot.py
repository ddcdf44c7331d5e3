"""Encode the rows as ``surefoot train`` does: ``data.prepare``, the codec and ``stage: sft``."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import partial

from outcome import Item, task

from surefoot.data.section import DataSection
from surefoot.data.store.dataset import EncodedDataset
from surefoot.data.text.codec import Codec
from surefoot.data.text.templates import load_template
from surefoot.data.training_data import Encoding, prepare
from surefoot.model.tokenizer import load_tokenizer
from surefoot.stages._sft import SFT

todo = task()
section = DataSection(
    datasets=("rows",), dataset_dir=todo.inputs, template="chatml", cutoff_len=todo.cutoff_len
)
tokenizer = load_tokenizer(todo.inputs)
codec = Codec(tokenizer, load_template(section.template, tokenizer), section)
stage = SFT()


def encode() -> EncodedDataset:
    """Through the cache, which XDG_CACHE_HOME places."""
    fingerprint = {"codec": codec.fingerprint, "stage": repr(stage)}
    encode = partial(stage.encode, codec=codec)
    return prepare(Encoding(section, encode, fingerprint, 42)).train


def items(dataset: EncodedDataset) -> Iterator[Item]:
    """Ids and labels of every row."""
    for index in range(len(dataset)):
        yield dataset[index]["input_ids"], dataset[index]["labels"]


gc.freeze()  # what is imported is not looked through again, as in ``surefoot train``
todo.run(encode, items)
