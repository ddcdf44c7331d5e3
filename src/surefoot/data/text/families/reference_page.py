"""The reference page of the families' chat templates, written from the table."""

from __future__ import annotations

from .family import TemplateFamily, families

HEAD = """# Chat templates of families

`data.template: NAME` uses one of these. [Chat templates](../templates.md) says what all of them
share, and how they compare with LLaMA-Factory's.

- *end*: the tokens that end a response; *eos* is the tokenizer's own. *last turn* means that the
  end is written after the last response only. It is trained for every response all the same.
- *tools*: the syntax of tools and calls. `data.tool_format` chooses another one.
- *thoughts*: the words around a thought. `data.enable_thinking` switches them.
- *system message*: the one that LLaMA-Factory adds to conversations without one. Surefoot adds
  none; `surefoot recipe convert` writes it as `data.default_system`.
"""


def families_page() -> str:
    """One row for each family."""
    head = ["| name | end | tools | thoughts | system message |", "|---|---|---|---|---|"]
    return "\n".join([HEAD, *head, *map(_row, families().values()), ""])


def _row(family: TemplateFamily) -> str:
    ends = [f"`{stop}`" for stop in family.stop] or ["eos"]
    cells = [
        f"`{family.name}`",
        ", ".join(ends) + (" (last turn)" if family.last_ends else ""),
        f"`{family.tools}`",
        " ".join(f"`{word.strip()}`" for word in family.thoughts[:2]),
        _shortened(family.default_system or ""),
    ]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _shortened(text: str) -> str:
    line = " ".join(text.replace("<", "&lt;").split())
    return line if len(line) <= 60 else line[:57] + "..."
