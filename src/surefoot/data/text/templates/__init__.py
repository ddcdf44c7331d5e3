"""Chat templates by name: every ``*.jinja`` in this folder is one, and every family of the table
``families.yaml``; adding one is adding a file, or a row.

A file begins with a Jinja comment that contains YAML: ``description``, ``aliases``, ``tokens`` (the
special tokens it writes), ``stop`` (what ends a response; the end-of-sequence token if absent) and
``tools``. The rest is the template as it is saved with the weights, with ``{% generation %}`` marks
around the trained part of a response. ``{%- include "x.part" %}`` is replaced by that file's text,
so that the saved template is self-contained. Nothing else is ever added to a conversation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import cast

from ruamel.yaml import YAML
from transformers import PreTrainedTokenizerBase

from ....errors import TemplateError, did_you_mean
from ...section import DataSection
from ..families import checked_syntax, families, family_source, may_be_of_family
from .render import PROBES, USUAL, Probe, Renderer, Words

FOLDER = Path(__file__).parent
AUTO = "auto"
_HEAD = re.compile(r"\A\{#-?\n(.*?)\n-?#\}\n", re.DOTALL)
_INCLUDE = re.compile(r'\{%- include "([\w.]+)" %\}\n')

GIVEN = ("messages", "tools", "documents", "add_generation_prompt")  # by what renders it
_NAME = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True)
class Template:
    """A chat template. ``stop`` are the tokens that end a response."""

    name: str
    source: str  # Jinja, as ``tokenizer.chat_template`` takes it
    stop: tuple[str, ...] = ()
    last_ends: tuple[str, ...] = ()  # what ends the last response only; each learns one of them
    thoughts: Words = USUAL  # the words around a thought


@dataclass(frozen=True, slots=True)
class Bundled(Template):
    """One template file of this folder, or one family of the table; ``{eos}`` is the tokenizer's
    own end."""

    description: str = ""
    aliases: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    tools: str = ""


@cache
def bundled() -> Mapping[str, Bundled]:
    """Every template of this folder, by name."""
    return {path.stem: _read(path) for path in sorted(FOLDER.glob("*.jinja"))}


def names() -> list[str]:
    """Valid values of ``data.template``, except ``auto``: names and aliases."""
    return sorted({*bundled(), *_aliases(), *families()})


@cache
def find_bundled(name: str, tool_format: str | None = None) -> Bundled | None:
    """The file or the family called ``name``, a family with another syntax of tools if one is
    given. Raises ``TemplateError``: there is no such syntax."""
    family = families().get(name)
    if family is None:
        return bundled().get(_aliases().get(name, name))
    if tool_format is not None:
        family = replace(family, tools=checked_syntax(tool_format), call=None)
    return Bundled(
        family.name,
        family_source(family),
        tokens=family.tokens,
        stop=family.stop,
        tools=family.tools,
        last_ends=family.last_ends,
        thoughts=(family.thoughts[0], family.thoughts[1]) if family.thoughts else USUAL,
    )


def load_template(
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    arguments: Mapping[str, object] | None = None,
    tool_format: str | None = None,
) -> Template:
    """The template called ``name``, checked against ``tokenizer``; ``auto`` is the tokenizer's own.

    Args:
        name: of a file, of a family, or ``auto``.
        tokenizer: the model's.
        arguments: what the template gets beside messages, such as ``enable_thinking``.
        tool_format: another syntax of tools than the family's.

    Raises:
        TemplateError: unknown name, no template to use, special tokens that the tokenizer would
            split, or an argument that the template does not use.
    """
    template = _saved_template(tokenizer) if name == AUTO else _named(name, tokenizer, tool_format)
    if tool_format is not None and name not in families():
        raise TemplateError(
            f"data.tool_format: {tool_format}, but template {name!r} has its own syntax of tools; "
            "remove tool_format, or choose a data.template of the families of docs/templates.md"
        )
    if not arguments:
        return template
    return replace(template, source=with_arguments(template.source, arguments, name))


def section_template(section: DataSection, tokenizer: PreTrainedTokenizerBase) -> Template:
    """The template of a recipe, with its arguments. Raises what ``load_template`` raises."""
    arguments = section.template_arguments
    return load_template(section.template, tokenizer, arguments, section.tool_format)


def optional_template(section: DataSection, tokenizer: PreTrainedTokenizerBase) -> Template | None:
    """The same; None if it is to be the tokenizer's, which has none."""
    if section.template == AUTO and saved_source(tokenizer) is None:
        return None
    return section_template(section, tokenizer)


def _named(name: str, tokenizer: PreTrainedTokenizerBase, tool_format: str | None) -> Template:
    template = find_bundled(name, tool_format)
    if template is None:
        raise TemplateError(f"data.template: no template is called {name!r}{_nearest(name)}")
    _check_tokens(template, tokenizer)
    eos = cast(str, tokenizer.eos_token)
    last_ends = tuple(eos if end == "{eos}" else end for end in template.last_ends)
    return replace(template, name=name, stop=template.stop or (eos,), last_ends=last_ends)


def template_mismatch(
    template: Template, tokenizer: PreTrainedTokenizerBase, owner: str = "model"
) -> str | None:
    """A warning if the model, or its adapter, was saved with a template that renders differently;
    None if not."""
    saved = saved_source(tokenizer)
    if saved is None or template.name == AUTO or saved == template.source:
        return None
    renderers = Renderer(template.source, tokenizer), Renderer(saved, tokenizer)
    pairs = {case: [_try(each, probe) for each in renderers] for case, probe in PROBES.items()}
    different = {case: pair for case, pair in pairs.items() if pair[0] != pair[1]}
    if not different:
        return None
    if all("tools" in PROBES[case] for case in different):  # which few data sets have
        return (
            f"template {template.name!r} writes function calling in other words than the {owner}'s "
            f"own; rows without tools are the same. `template: auto` keeps the {owner}'s own"
        )
    first, pair = next(iter(different.items()))
    ours, theirs = _where_they_part(*pair)
    return (
        f"template {template.name!r} differs from the chat template saved with the {owner}, for "
        f"{', '.join(different)}. For {first}, {template.name!r} writes {ours} where the "
        f"{owner}'s own writes {theirs}. The run trains with {template.name!r} and saves it with "
        f"the weights; `template: auto` keeps the {owner}'s own"
    )


def saved_source(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The Jinja text of the tokenizer's own chat template, its ``default`` if it has several."""
    saved = tokenizer.chat_template
    if isinstance(saved, dict):
        saved = saved.get("default") or next(iter(saved.values()), None)
    return saved or None


def _saved_template(tokenizer: PreTrainedTokenizerBase) -> Template:
    source = saved_source(tokenizer)
    if source is None:
        raise TemplateError(
            "data.template: auto, but this model's tokenizer has no chat template; "
            f"name the model's family, such as {', '.join(sorted(bundled()))}; "
            "docs/templates.md lists them all"
        )
    closing = Renderer(source, tokenizer).closing_token()
    stop = dict.fromkeys(token for token in (closing, tokenizer.eos_token) if token)
    template = Template(AUTO, source, tuple(stop))
    if not may_be_of_family(source):
        return template
    # The family whose template a run saved, if need be with arguments in front.
    bodies = ((name, family_source(family)) for name, family in families().items())
    family = next((name for name, body in bodies if source.endswith(body)), None)
    if family is None:
        return template
    family_template = _named(family, tokenizer, None)
    stop |= dict.fromkeys(family_template.stop)
    return replace(family_template, name=AUTO, source=source, stop=tuple(stop))


def _check_tokens(template: Bundled, tokenizer: PreTrainedTokenizerBase) -> None:
    needs_eos = not template.stop or "eos_token" in template.source
    if needs_eos and not tokenizer.eos_token:
        raise TemplateError(
            f"template {template.name!r} ends responses with the tokenizer's eos_token, but this "
            "tokenizer has none"
        )
    pieces = {token: tokenizer.encode(token, add_special_tokens=False) for token in template.tokens}
    if missing := [token for token, ids in pieces.items() if len(ids) != 1]:
        raise TemplateError(
            f"template {template.name!r} writes {', '.join(missing)}, which this tokenizer would "
            f"split into pieces; add model.new_special_tokens: [{', '.join(map(repr, missing))}] "
            "(and train their embeddings: method full, or with lora method.lora.modules_to_save: "
            "[embed_tokens, lm_head]), or choose another template, such as alpaca"
        )


def _aliases() -> dict[str, str]:
    return {alias: name for name, template in bundled().items() for alias in template.aliases}


def _nearest(name: str) -> str:
    more = f"{len(families())} families, which docs/templates.md lists"
    hint = did_you_mean(name, [*names(), AUTO])
    return f"{hint}; choose auto, {', '.join(sorted({*bundled(), *_aliases()}))}, or one of {more}"


def _where_they_part(ours: str, theirs: str) -> tuple[str, str]:
    """Two texts, from shortly before the first difference."""
    pairs = enumerate(zip(ours, theirs, strict=False))
    same = next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
    start = max(0, same - 20)
    return repr(ours[start : start + 80]), repr(theirs[start : start + 80])


def _try(renderer: Renderer, probe: Probe) -> str:
    """A probe with its next response, or its generation prompt: the two must agree in both."""
    answer: dict[str, object] = {"role": "assistant", "content": "Answer"}
    answered = [*probe["messages"], answer]
    try:
        prompt = renderer.render(probe["messages"], probe.get("tools"), prompt=True)
        return prompt + renderer.render(answered, probe.get("tools")).removeprefix(prompt).rstrip()
    except TemplateError as error:
        return f"an error ({error})"


def _read(path: Path) -> Bundled:
    text = path.read_text(encoding="utf-8")
    head = _HEAD.match(text)
    if head is None:
        raise TemplateError(f"{path}: expected a Jinja comment with YAML (description, ...) on top")
    fields = YAML(typ="safe").load(head[1])
    source = _INCLUDE.sub(lambda part: (FOLDER / part[1]).read_text("utf-8"), text[head.end() :])
    fields |= {key: tuple(fields.get(key, ())) for key in ("aliases", "tokens", "stop")}
    return Bundled(path.stem, source.removesuffix("\n"), **fields)


# Arguments, such as ``enable_thinking``, are written into a template as its defaults. So the
# template that is saved with the weights renders as in training wherever it is used, and a caller
# can still pass another value.


def with_arguments(source: str, arguments: Mapping[str, object], template: str) -> str:
    """``source`` with defaults for the names in ``arguments``; ``template`` is its name.

    Raises ``TemplateError``: the template does not use one of them.
    """
    used_names = set(_NAME.findall(source))
    for name in arguments:
        if name not in used_names or name in GIVEN:
            hint = did_you_mean(name, used_names, cutoff=0.8)
            raise TemplateError(
                f"chat template {template!r} has no argument {name!r}{hint}, so data.{_key(name)} "
                "would change nothing; remove it, or choose another data.template"
            )
    defaults = (
        f"{{%- set {name} = {name} if {name} is defined else {_literal(value)} +%}}"
        for name, value in arguments.items()
    )
    return "".join(defaults) + source


def with_system(source: str, text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """``source`` with the system message ``text`` before messages that begin with no other."""
    in_parts = Renderer(source, tokenizer).needs_parts
    content = _literal([{"type": "text", "text": text}] if in_parts else text)
    message = f'[{{"role": "system", "content": {content}}}]'
    is_there = 'messages and messages[0]["role"] == "system"'
    return f"{{%- set messages = messages if {is_there} else {message} + messages|list +%}}{source}"


def check_row_arguments(arguments: Mapping[str, object]) -> None:
    """Raise ``TemplateError`` if an argument of a row has the name of what is given by whatever
    renders it."""
    for name in arguments:
        if name in GIVEN:
            raise TemplateError(f"chat_template_kwargs: {name!r} is no argument of a row")


def _key(name: str) -> str:
    settings = ("enable_thinking", "preserve_thinking")
    return name if name in settings else f"chat_template_kwargs.{name}"


def _literal(value: object) -> str:
    """A value of YAML as Jinja writes it."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        items = (f"{_literal(str(key))}: {_literal(each)}" for key, each in value.items())
        return "{" + ", ".join(items) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_literal, value)) + "]"
    return json.dumps(value if isinstance(value, int | float) else str(value), ensure_ascii=False)
