"""The reference page of LLaMA-Factory's arguments, written from the table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from .arguments import FILES, GROUPS
from .arguments.argument import Argument, Combined, NoEffect, OtherCommand, Refused, Same

HEAD = """# LLaMA-Factory's arguments

Every argument of LLaMA-Factory 0.9.5, with those of transformers that it extends.
[From LLaMA-Factory](../how-to/from-llamafactory.md) says how to use them.

- A setting's name: the argument is this setting, with the same value or as noted.
- *no effect*: nothing needs to be set, for the reason given. A run lists these arguments once.
- *refused*: any value but the default is an error, which says what to write instead.
- *another command*: the argument is not of training.
"""


def arguments_page() -> str:
    """All groups, with a table each."""
    return "\n".join([HEAD, *groups(GROUPS), *groups(FILES)])


def groups(tables: Mapping[str, Mapping[str, Argument]]) -> Iterator[str]:
    """The lines of a table of arguments for each title."""
    for title, arguments in tables.items():
        yield f"## {title}\n"
        yield "| argument | default | here |"
        yield "|---|---|---|"
        for name, argument in arguments.items():
            cells = [f"`{name}`", f"`{_default(argument.default)}`", _outcome(argument)]
            yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
        yield ""


def _default(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _outcome(argument: Argument) -> str:
    outcome = argument.outcome
    if isinstance(outcome, Same):
        return f"`{outcome.setting}`" + (f"; {outcome.note}" if outcome.note else "")
    if isinstance(outcome, Combined):
        named = ", ".join(f"`{setting}`" for setting in outcome.settings)
        return named if outcome.note == "as it is" else f"{named}: {outcome.note}"
    if isinstance(outcome, NoEffect):
        return f"*no effect*: {outcome.reason}"
    assert isinstance(outcome, Refused | OtherCommand)
    if isinstance(outcome, Refused):
        return f"*refused*: {outcome.reason}"
    return f"*another command*: {outcome.instead}"
