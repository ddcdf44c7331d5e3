"""Encode the rows as ``llamafactory-cli train`` does: ``get_dataset`` for ``stage: sft``.

Runs in the peers' environment. With ``TOKENIZED_PATH`` set, that folder is LLaMA-Factory's
``tokenized_path``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from datasets import Dataset, disable_progress_bars
from llamafactory.data import get_dataset, get_template_and_fix_tokenizer
from llamafactory.hparams import get_train_args
from llamafactory.model import load_tokenizer
from outcome import Item, task

todo = task()
disable_progress_bars()
model_args, data_args, training_args, _, _ = get_train_args(
    {
        "model_name_or_path": str(todo.inputs),
        "dataset_dir": str(todo.inputs),
        "dataset": "rows",
        "template": "chatml",
        "cutoff_len": todo.cutoff_len,
        "tokenized_path": os.environ.get("TOKENIZED_PATH"),
        "stage": "sft",
        "do_train": True,
        "output_dir": str(todo.report.with_suffix(".run")),
        "use_cpu": True,
    }
)
module = load_tokenizer(model_args)
template = get_template_and_fix_tokenizer(module["tokenizer"], data_args)


def encode() -> Dataset:
    """Through the cache, which HF_HOME places."""
    found = get_dataset(template, model_args, data_args, training_args, stage="sft", **module)
    return found["train_dataset"]


def items(dataset: Dataset) -> Iterator[Item]:
    """Ids and labels of every row."""
    for row in dataset:
        yield row["input_ids"], row["labels"]


todo.run(encode, items)
