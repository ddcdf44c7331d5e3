"""``README.md`` of a folder with quantized weights: what it is, what serves it, its losses."""

from __future__ import annotations

import re
from pathlib import Path

from ...errors import CheckpointError
from ...storage import files
from .receipt import CARD, Receipt

_BEGIN, _END = "<!-- quality: written by surefoot export -->", "<!-- end of quality -->"
_MARKED = re.compile(f"{re.escape(_BEGIN)}.*?{re.escape(_END)}", re.DOTALL)
_ALGORITHMS = {
    "rtn": "rounded to nearest",
    "gptq": "calibrated by GPTQ on rows of the training data",
}


def card_text(receipt: Receipt) -> str:
    """The whole page."""
    made, what = receipt.made_from, receipt.artefact
    how = _ALGORITHMS[str(what.settings.get("algorithm", "rtn"))]
    size = what.settings.get("group_size")
    groups = f", a scale for {size} inputs" if what.type == "w4a16" else ""
    name = Path(made.checkpoint).name
    return f"""---
library_name: transformers
tags:
- compressed-tensors
- {what.type}
---

# {Path(made.checkpoint).parent.name or name} ({what.type})

`{name}` with its linear layers as {what.type} in the format of compressed-tensors, {how}{groups}.
The output head and the embeddings are not quantized. Written by Surefoot {receipt.surefoot};
`receipt.json` has the hashes of what it was made from.

{_quality(receipt)}

```sh
vllm serve FOLDER
python -m sglang.launch_server --model-path FOLDER
```
"""


def write_quality(target: Path, receipt: Receipt) -> None:
    """Replace the section of the figures in the page of ``target``; the rest stays, and so does a
    page without the section."""
    path = target / CARD
    if not target.is_dir() or not path.is_file():
        return
    text = path.read_text(encoding="utf-8")
    changed = _MARKED.sub(lambda _: _quality(receipt), text, count=1)
    if changed != text:
        with files.raising(CheckpointError, "cannot write the card"):
            files.write_aside(path, changed.encode())


def _quality(receipt: Receipt) -> str:
    return "\n".join([_BEGIN, *_lines(receipt), _END])


def _lines(receipt: Receipt) -> list[str]:
    lines = []
    if found := receipt.quality:
        lines += [
            f"On {found['num_rows']} held-out rows ({found['num_tokens']:,} trained tokens):",
            "",
            "| | this model | the original |",
            "|---|---|---|",
            f"| perplexity | {_number(found['perplexity'])} | "
            f"{_number(found['checkpoint_perplexity'])} |",
            f"| exact match | {found['exact_match']:.1%} | {found['checkpoint_exact_match']:.1%} |",
            f"| most probable tokens that are equal | {found['token_agreement']:.1%} | |",
            "",
        ]
    if found := receipt.verified:
        lines.append(
            f"On fixed prompts, the loss is {found['loss']:.4f} (of the original "
            f"{found['checkpoint_loss']:.4f}), and {found['equal_tokens']} of "
            f"{found['compared_tokens']} greedy tokens are equal."
        )
    return lines or ["The loss of quality was not measured; `surefoot export verify` measures it."]


def _number(value: float | None) -> str:
    return "infinite" if value is None else f"{value:.3f}"
