"""The reference page of GGUF: formats and architectures, from their tables."""

from __future__ import annotations

from gguf import GGML_QUANT_SIZES

from .architectures import ARCHITECTURES, GGUFArchitecture
from .formats import FORMATS, Format
from .vocabulary import PRE_TOKENIZERS

_TEXT = """# GGUF

What `surefoot export --to gguf` writes; [how to export](../how-to/export.md) says how it is used.

## Formats

Values of `--quantize`. A tensor with one dimension, a norm or a router stays in float32. In formats
of blocks, the output, or the embeddings that are tied to it, have 6 bits at least. Bits a weight
are those of the main type, scales included.

| `--quantize` | main type | bits a weight | |
|---|---|---|---|
{formats}

A row whose length is no multiple of a block is written as in llama.cpp: `Q4_K` as `Q5_0`, `Q5_K` as
`Q5_1`, `Q6_K` as `Q8_0`, and as `F16` where that does not fit either. The export reports it.

## Architectures

By `model_type` in `config.json`. Any other is refused, and so is a model that differs from what
llama.cpp takes for granted: it would load and give other answers.

| `model_type` | in the file | differs from the model in memory |
|---|---|---|
{architectures}

Rotary embeddings: `default`, `linear` and `yarn`; `llama3` for llama and mistral, `longrope` for
phi3.

## Tokenizers

Byte-level BPE and SentencePiece BPE, from `tokenizer.json`. llama.cpp knows the rule that splits a
text by a name:
{rules}.
A tokenizer with another rule gets the name of the rule that makes the same tokens of 20,000 random
texts. If up to one text in a thousand differs, the export says so; above that it is refused.
"""


def gguf_page() -> str:
    """The page."""
    formats = [_format(name, one) for name, one in FORMATS.items()]
    rows = [_row(name, one) for name, one in ARCHITECTURES.items()]
    rules = ", ".join(f"`{name}`" for name in PRE_TOKENIZERS.values())
    return _TEXT.format(formats="\n".join(formats), architectures="\n".join(rows), rules=rules)


def _format(name: str, one: Format) -> str:
    weights, size = GGML_QUANT_SIZES[one.main]
    return f"| `{name}` | {one.main.name} | {size * 8 / weights:.4g} | {one.description} |"


def _row(name: str, one: GGUFArchitecture) -> str:
    notes = []
    if one.is_permuted:
        notes.append("rows of `q_proj` and `k_proj` change places")
    if one.norm_shift:
        notes.append("1 is added to norms")
    if name == "qwen3_moe":
        notes.append("experts are one tensor")
    return f"| `{name}` | `{one.name}` | {'; '.join(notes)} |"
