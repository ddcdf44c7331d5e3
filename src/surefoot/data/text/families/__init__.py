"""Chat templates of model families: a table of their texts, written as Jinja when they are used."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from ruamel.yaml import YAML

from ....errors import TemplateError, did_you_mean

TABLE = Path(__file__).with_name("families.yaml")
_TOKENS = re.compile(  # what looks like a token that delimits turns
    r"<\|[^|<>]+\|>|<｜[^｜]+｜>|<\|\w+>|<\w+\|>|<(?:start|end)_of_turn>|<_\w+>|<eod>|<sep>|<sop>"
    r"|<(?:beginning|end)_of_sentence>|\[gMASK\]|\]~!?b\[?\]?|\[e~\[|\[\|\w+\|\]|reserved_\d"
)

TOOLS = Path(__file__).with_name("tools")
_SLOT = re.compile(r"\{(content|bos|eos)\}")
_RESPONSE = "<tool_response>\n{content}\n</tool_response>"
_JOINT = "\n</tool_response>\n<tool_response>\n"  # between results of one turn
_ENDIF = "{%- endif %}\n"
_SYSTEM = """\
{%- set has_system = messages and messages[0].role == 'system' %}
{%- set turns = messages[1:] if has_system else messages %}
{%- set schemas = tools_text(tools) if tools else '' %}
{%- set instruction = messages[0].content ~ schemas if has_system else schemas.lstrip('\\n') %}
"""
_THINKS = """\
{%- set thinks = enable_thinking is not defined or enable_thinking is none or enable_thinking %}
{%- set keeps = preserve_thinking is defined and preserve_thinking %}
{%- set last = namespace(question=-1) %}
{%- for message in turns %}
    {%- if message.role == 'user' %}
        {%- set last.question = loop.index0 %}
    {%- endif %}
{%- endfor %}
"""
_THOUGHT = """\
        {%%- set said = message.content %%}
        {%%- if message.reasoning_content %%}
            {%%- set said = %(open)s ~ message.reasoning_content ~ %(close)s ~ said %%}
        {%%- endif %%}
        {%%- set thought = %(first)s in said or %(last)s in said %%}
        {%%- if thought and (not thinks or not (keeps or loop.index0 > last.question)) %%}
            {%%- set thought = false %%}
            {%%- set said = said.split(%(last)s)[-1].lstrip('\\n') %%}
        {%%- endif %%}
        {%%- if not thought %%}
            {{- %(empty)s if keeps or loop.last else %(unthought)s }}
        {%%- endif %%}
"""
_CALL = """\
            {%%- set calls = calls_text(message.tool_calls) %%}
            {{- '\\n' if said and not said.endswith(%(ends)s) and not calls.startswith('\\n') }}
            {{- calls }}
"""
_ALONE = (
    "{{- raise_exception('%(name)s has a system message only at the start, in the first user turn;"
    " found role ' ~ message.role) }}"
)
_FIRST = """\
{%%- if instruction and not (turns and turns[0].role == 'user') %%}
    {{- raise_exception('%(name)s writes the system message and the tools into the first user \
turn, so that turn must come first') }}
{%%- endif %%}
"""


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
        delimiters = [token for text in texts for token in _TOKENS.findall(text)]
        return tuple(dict.fromkeys([*delimiters, *self.stop]))


@cache
def families() -> Mapping[str, TemplateFamily]:
    """Every family by name."""
    table = YAML(typ="safe").load(TABLE.read_text(encoding="utf-8"))
    shapes: dict[str, dict[str, object]] = {}
    family_fields: dict[str, dict[str, object]] = {}
    for resolved, rows in ((shapes, table["shapes"]), (family_fields, table["families"])):
        for name, fields in rows.items():
            like = fields.pop("like", None)
            inherited = {} if like is None else shapes.get(like) or family_fields[like]
            resolved[name] = {**inherited, **fields}
    return {name: _family(name, fields) for name, fields in family_fields.items()}


def _family(name: str, fields: Mapping[str, object]) -> TemplateFamily:
    values = {key: tuple(v) if isinstance(v, list) else v for key, v in fields.items()}
    return TemplateFamily(name=name, **values)  # type: ignore[arg-type]


def may_be_of_family(source: str) -> bool:
    """Whether a family may have written ``source``, without reading the table of families, which
    takes a tenth of a second."""
    return _SYSTEM in source


@cache
def family_source(family: TemplateFamily) -> str:
    """The template of ``family``, as it is saved with the weights."""
    opening = "{%- if has_system or tools %}\n" + _texts(family.system, "instruction") + _ENDIF
    user, later = "message.content", _texts(family.system, "message.content")
    if family.system_in_user:
        name = {"name": family.name}
        opening = _FIRST % name + "{%- set lead %}\n" + opening + "{%- endset %}\n"
        user, later = "(lead if loop.first else '') ~ message.content", _ALONE % name + "\n"
    empty = ""
    if family.thoughts:
        written = f"    {{{{- {_words(family)['empty']} }}}}\n"
        empty = "    {%- if not thinks %}\n" + written + "    {%- endif %}\n"
    parts = [
        (TOOLS / f"{family.tools}.part").read_text(encoding="utf-8") + _SYSTEM,
        *([_THINKS] if family.thoughts else []),
        _texts(family.prefix) + opening + "{%- for message in turns %}\n",
        "    {%- if message.role == 'user' %}\n" + _texts(family.user, user),
        "    {%- elif message.role == 'assistant' %}\n" + _answer(family),
        "    {%- elif message.role == 'tool' %}\n" + _result(family),
        "    {%- else %}\n" + later + "    {%- endif %}\n{%- endfor %}\n",
        "{%- if add_generation_prompt %}\n" + _texts(family.header) + empty + "{%- endif %}",
    ]
    return "".join(parts)


def checked_syntax(name: str) -> str:
    """``name``, a syntax of tools. Raises ``TemplateError``: there is none of that name."""
    syntaxes = sorted(path.stem for path in TOOLS.glob("*.part"))
    if name not in syntaxes:
        expected = f"data.tool_format: expected one of {', '.join(syntaxes)}"
        raise TemplateError(f"{expected}, got {name!r}{did_you_mean(name, syntaxes)}")
    return name


def quoted(text: str) -> str:
    """A text as a string of Jinja."""
    for letter, written in (("\\", "\\\\"), ("'", "\\'"), ("\n", "\\n")):
        text = text.replace(letter, written)
    return f"'{text}'"


def _texts(text: str, content: str = "") -> str:
    """Statements that write a text of the table, with an expression for its content."""
    names = {"content": content, "bos": "bos_token", "eos": "eos_token"}
    pieces = _SLOT.split(text)
    written = [names[p] if i % 2 else quoted(p) for i, p in enumerate(pieces) if p]
    return "".join(f"    {{{{- {each} }}}}\n" for each in written)


def _answer(family: TemplateFamily) -> str:
    call = family.call or family.answer
    assignment = "        {%- set said = message.content %}\n"
    if family.thoughts:
        assignment = _THOUGHT % _words(family)
    before_call, _, after_call = call.partition("{content}")
    before, _, after = family.answer.partition("{content}")
    written = "{{- said }}\n"
    is_lead = before_call and not family.thoughts  # such as [TOOL_CALLS], behind what is said
    calling = (written + _texts(before_call)) if is_lead else (_texts(before_call) + written)
    ends = "('\\n',)" if not family.thoughts else f"('\\n', {quoted(family.thoughts[1])})"
    calling += "{{- calls_text(message.tool_calls) }}\n" if is_lead else _CALL % {"ends": ends}
    called, call_tail = _ending(family, after_call, family.ends[-1])
    plain, tail = _ending(family, after, family.ends[0])
    if call_tail != tail:
        tail = (
            f"        {{%- if message.tool_calls %}}\n{call_tail}        {{%- else %}}\n{tail}"
            "        {%- endif %}\n"
        )
    marks = ("", "") if family.thoughts else ("{%- generation %}\n", "{%- endgeneration %}\n")
    return (
        _texts(family.header)
        + assignment
        + marks[0]
        + "        {%- if message.tool_calls %}\n"
        + calling
        + called
        + "        {%- else %}\n"
        + _texts(before)
        + written
        + plain
        + "        {%- endif %}\n"
        + marks[1]
        + tail
    )


def _ending(family: TemplateFamily, after: str, end: str) -> tuple[str, str]:
    """What an answer ends with, and what stands after its end; ``end`` is that of the last one."""
    eos = ""
    if family.ends_once:
        other = f"{{%- else %}}\n{_texts(family.between)}" if family.between else ""
        eos = f"        {{%- if loop.last %}}\n{_texts(end)}{other}        {{%- endif %}}\n"
    trained, masked = family.split_end(after)
    if family.ends_once and not trained.endswith(("{eos}", *family.stop)):
        return _texts(trained) + eos, ""
    return _texts(trained), _texts(masked) + eos


def _result(family: TemplateFamily) -> str:
    text = family.result or family.user
    if _RESPONSE not in text:
        return _texts(text, "message.content")
    before, after = text.split("{content}")
    return (
        "        {%- if not loop.first and loop.previtem.role == 'tool' %}\n"
        + _texts(_JOINT)
        + "        {%- else %}\n"
        + _texts(before)
        + "        {%- endif %}\n"
        + _texts("{content}", "message.content")
        + "        {%- if loop.last or loop.nextitem.role != 'tool' %}\n"
        + _texts(after)
        + "        {%- endif %}\n"
    )


def _words(family: TemplateFamily) -> dict[str, str]:
    first, last = family.thoughts
    empty = first + last if family.empty_thought is None else family.empty_thought
    texts = {"open": first, "close": last, "first": first.strip(), "last": last.strip()}
    return {
        key: quoted(text)
        for key, text in {**texts, "empty": empty, "unthought": family.unthought}.items()
    }
