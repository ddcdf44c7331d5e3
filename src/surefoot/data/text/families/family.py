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
    """The texts of one family's conversations; ``families.yaml`` says what each is."""

    name: str
    user: str
    answer: str
    prefix: str = ""
    system: str = "{content}"
    header: str = ""
    call: str | None = None
    result: str | None = None
    tools: str = "default"
    thoughts: tuple[str, ...] = ()
    empty_thought: str | None = None
    unthought: str = ""
    between: str = ""
    stop: tuple[str, ...] = ()
    system_in_user: bool = False
    ends_once: bool = False
    ends: tuple[str, ...] = ("{eos}",)
    is_plain: bool = False
    default_system: str | None = None

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
    for name, fields in table["shapes"].items():
        shapes[name] = _whole(fields, shapes)
    return {
        name: _family(name, _whole(fields, shapes)) for name, fields in table["families"].items()
    }


def _whole(
    fields: Mapping[str, object], shapes: Mapping[str, Mapping[str, object]]
) -> dict[str, object]:
    own = {key: value for key, value in fields.items() if key != "like"}
    return {**shapes[str(fields["like"])], **own} if "like" in fields else own


def _family(name: str, fields: Mapping[str, object]) -> TemplateFamily:
    values = {key: tuple(v) if isinstance(v, list) else v for key, v in fields.items()}
    return TemplateFamily(name=name, **values)  # type: ignore[arg-type]
