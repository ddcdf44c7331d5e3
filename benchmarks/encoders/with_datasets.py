"""Encode the rows with plain ``datasets.map`` and ``tokenizer.apply_chat_template``, in batches.

This is the documented way to get labels on the answers only: the template has ``{% generation %}``
marks, ``return_assistant_tokens_mask`` says which tokens they cover, the rest is -100. A thousand
rows go through one call, so the Rust tokenizer uses all cores; ``num_proc`` is 1.
"""

from __future__ import annotations

from collections.abc import Iterator

from datasets import Dataset, disable_progress_bars, load_dataset
from outcome import Item, task
from transformers import AutoTokenizer

todo = task()
tokenizer = AutoTokenizer.from_pretrained(todo.inputs)
cutoff_len = todo.cutoff_len
disable_progress_bars()


def encode_batch(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
    """A batch of Alpaca rows to ids and labels."""
    conversations = [
        [
            {"role": "user", "content": f"{instruction}\n{context}" if context else instruction},
            {"role": "assistant", "content": answer},
        ]
        for instruction, context, answer in zip(
            rows["instruction"], rows["input"], rows["output"], strict=True
        )
    ]
    encoded = tokenizer.apply_chat_template(
        conversations,
        return_dict=True,
        return_assistant_tokens_mask=True,
        truncation=True,
        max_length=cutoff_len,
    )
    labels = [
        [token if learnt else -100 for token, learnt in zip(ids, mask, strict=True)]
        for ids, mask in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
    ]
    return {"input_ids": encoded["input_ids"], "labels": labels}


def encode() -> Dataset:
    """Through the cache, which HF_HOME places."""
    rows = load_dataset("json", data_files=str(todo.inputs / "rows.json"), split="train")
    return rows.map(encode_batch, batched=True, batch_size=1000, remove_columns=rows.column_names)


def items(dataset: Dataset) -> Iterator[Item]:
    """Ids and labels of every row."""
    for row in dataset:
        yield row["input_ids"], row["labels"]


todo.run(encode, items)
