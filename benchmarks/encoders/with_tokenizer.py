"""The floor: the Rust tokenizer alone, on texts that are rendered already; no labels, no cache."""

from __future__ import annotations

import json
from collections.abc import Iterator

from outcome import Item, task
from tokenizers import Encoding
from transformers import AutoTokenizer

todo = task()
tokenizer = AutoTokenizer.from_pretrained(todo.inputs)
rows = json.loads((todo.inputs / "rows.json").read_text(encoding="utf-8"))
texts = [
    "<|im_start|>user\n"
    + "\n".join(part for part in (row["instruction"], row["input"]) if part)
    + f"<|im_end|>\n<|im_start|>assistant\n{row['output']}<|im_end|>\n"
    for row in rows
]


def encode() -> list[Encoding]:
    """Batches of a thousand, as the others have them."""
    rust = tokenizer.backend_tokenizer
    starts = range(0, len(texts), 1000)
    return [
        encoding
        for start in starts
        for encoding in rust.encode_batch(texts[start : start + 1000], add_special_tokens=False)
    ]


def items(encodings: list[Encoding]) -> Iterator[Item]:
    """Ids of every row, cut like the others'; nothing is learnt."""
    for encoding in encodings:
        ids = encoding.ids[: todo.cutoff_len]
        yield ids, [-100] * len(ids)


todo.run(encode, items)
