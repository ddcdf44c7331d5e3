"""One family of models: its texts, as a row of ``families.yaml``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from ruamel.yaml import YAML

TABLE = Path(__file__).with_name("families.yaml")
_TOKENS = re.compile(  # what looks like a token that delimits turns
    r"<\|[^|<>]+\|>|<｜[^｜]+｜>|<\|\w+>|<\w+\|>|<(?:start|end)_of_turn>|<_\w+>|<eod>|<sep>|<sop>"
    r"|<(?:beginning|end)_of_sentence>|\[gMASK\]|\]~!?b\[?\]?|\[e~\[|\[\|\w+\|\]|reserved_\d"
)


@dataclass(frozen=True, kw_only=True)
class TemplateFamily:
    """The texts of one family's conversations."""

    name: str
    user: str
    """The text of a user turn; ``{content}`` is what a turn says, ``{bos}`` and ``{eos}`` are the
    tokenizer's own tokens. It has no header of the answer."""
    answer: str
    """The text of an answer."""
    prefix: str = ""
    """The beginning of a conversation."""
    system: str = "{content}"
    """The text of a system message."""
    header: str = ""
    """What stands before an answer, and ends a prompt."""
    call: str | None = None
    """An answer that calls tools; None: as any answer."""
    result: str | None = None
    """What tools return; None: as a user turn."""
    tools: str = "default"
    """The syntax of tools, a file of the folder ``tools``."""
    thoughts: tuple[str, ...] = ()
    """The words around a thought; a family with them writes empty ones."""
    empty_thought: str | None = None
    """The empty thought; None: both words."""
    unthought: str = ""
    """What stands before an answer without its thought."""
    between: str = ""
    """What ends an answer that another turn follows."""
    stop: tuple[str, ...] = ()
    """What ends an answer, beside the eos token."""
    system_in_user: bool = False
    """Whether the system message stands in the first user turn."""
    ends_once: bool = False
    """Whether what ends an answer stands after the last turn only."""
    ends: tuple[str, ...] = ("{eos}",)
    """What that is after an answer, and after one that calls tools."""
    is_plain: bool = False
    """Whether words in angle brackets are plain text, not tokens."""
    default_system: str | None = None
    """The system message of LLaMA-Factory for conversations without one."""

    def split_end(self, after: str) -> tuple[str, str]:
        """``after``, the text after a response, as what is trained, and what follows it masked:
        the line breaks behind the token that ends the turn."""
        short = after.rstrip("\n")
        if self.ends_once and not short.endswith(("{eos}", *self.stop)):
            return after, ""  # no token ends the turn, so the text is part of the response
        return short, after[len(short) :]

    @property
    def masks_line_break(self) -> bool:
        """Whether a response is followed by a line break that is not trained on."""
        return bool(self.split_end(self.answer.partition("{content}")[2])[1])

    @property
    def ends_in_stop(self) -> bool:
        """Whether an answer's own text contains a token that stops it."""
        after = self.answer.partition("{content}")[2]
        return any(stop in after for stop in ("{eos}", *self.stop))

    @property
    def last_ends(self) -> tuple[str, ...]:
        """What ends the last answer only: the text of an answer that another turn follows has no
        end of its own."""
        is_unwritten = self.ends_once and not self.ends_in_stop and not self.between
        return self.ends if is_unwritten else ()

    @cached_property
    def tokens(self) -> tuple[str, ...]:
        """The delimiters that a tokenizer must not split."""
        if self.is_plain:
            return self.stop
        texts = (self.prefix, self.system, self.user, self.header, self.answer, self.result or "")
        found = [token for text in texts for token in _TOKENS.findall(text)]
        return tuple(dict.fromkeys([*found, *self.stop]))


@cache
def families() -> Mapping[str, TemplateFamily]:
    """Every family by name."""
    table = YAML(typ="safe").load(TABLE.read_text(encoding="utf-8"))
    shapes: dict[str, dict[str, object]] = {}
    found: dict[str, dict[str, object]] = {}
    for made, rows in ((shapes, table["shapes"]), (found, table["families"])):
        for name, fields in rows.items():
            like = fields.pop("like", None)
            made[name] = fields if like is None else {**(shapes.get(like) or found[like]), **fields}
    return {name: _family(name, fields) for name, fields in found.items()}


def _family(name: str, fields: Mapping[str, object]) -> TemplateFamily:
    values = {key: tuple(v) if isinstance(v, list) else v for key, v in fields.items()}
    return TemplateFamily(name=name, **values)  # type: ignore[arg-type]
