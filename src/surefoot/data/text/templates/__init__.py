"""Chat templates by name: every ``*.jinja`` in this folder is one; adding one is adding a file.

A file begins with a Jinja comment that contains YAML: ``description``, ``aliases``, ``tokens`` (the
special tokens it writes), ``stop`` (what ends a response; the end-of-sequence token if absent) and
``tools``. The rest is the template as it is saved with the weights, with ``{% generation %}`` marks
around the trained part of a response. ``{%- include "x.part" %}`` is replaced by that file's text,
so that the saved template is self-contained. Nothing else is ever added to a conversation.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import cast

from ruamel.yaml import YAML
from transformers import PreTrainedTokenizerBase

from ....errors import TemplateError
from .render import PROBES, Probe, Renderer

FOLDER = Path(__file__).parent
AUTO = "auto"
_HEAD = re.compile(r"\A\{#-?\n(.*?)\n-?#\}\n", re.DOTALL)
_INCLUDE = re.compile(r'\{%- include "([\w.]+)" %\}\n')


@dataclass(frozen=True, slots=True)
class Template:
    """A chat template. ``stop`` are the tokens that end a response."""

    name: str
    source: str  # Jinja, as ``tokenizer.chat_template`` takes it
    stop: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Bundled:
    """One template file of this folder."""

    name: str
    source: str
    description: str
    aliases: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    tools: str = ""


@cache
def bundled() -> Mapping[str, Bundled]:
    """Every template of this folder, by name."""
    return {path.stem: _read(path) for path in sorted(FOLDER.glob("*.jinja"))}


def names() -> list[str]:
    """Valid values of ``data.template``, except ``auto``: names and aliases."""
    return sorted({*bundled(), *_aliases()})


def load_template(name: str, tokenizer: PreTrainedTokenizerBase) -> Template:
    """The template called ``name``, checked against ``tokenizer``; ``auto`` is the tokenizer's own.

    Raises:
        TemplateError: unknown name, no template to use, or special tokens that the tokenizer would
            split.
    """
    if name == AUTO:
        return _own(tokenizer)
    found = bundled().get(_aliases().get(name, name))
    if found is None:
        raise TemplateError(f"data.template: no template is called {name!r}{_nearest(name)}")
    _check_tokens(found, tokenizer)
    return Template(name, found.source, found.stop or (cast(str, tokenizer.eos_token),))


def template_mismatch(template: Template, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """A warning if the model was saved with a template that renders differently; None if not, or if
    that template cannot be used."""
    saved = saved_source(tokenizer)
    if saved is None or template.name == AUTO or saved == template.source:
        return None
    try:
        renderers = Renderer(template.source, tokenizer), Renderer(saved, tokenizer)
    except TemplateError:
        return None  # the model's own is not used, and fails
    pairs = {case: [_try(each, probe) for each in renderers] for case, probe in PROBES.items()}
    different = {case: pair for case, pair in pairs.items() if pair[0] != pair[1]}
    if not different:
        return None
    first, pair = next(iter(different.items()))
    ours, theirs = _where_they_part(*pair)
    return (
        f"template {template.name!r} differs from the chat template saved with the model, for "
        f"{', '.join(different)}. For {first}, {template.name!r} writes {ours} where the "
        f"model's own writes {theirs}. The run trains with {template.name!r} and saves it with "
        "the weights; `template: auto` keeps the model's own"
    )


def saved_source(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The Jinja text of the tokenizer's own chat template, its ``default`` if it has several."""
    saved = tokenizer.chat_template
    if isinstance(saved, dict):
        saved = saved.get("default") or next(iter(saved.values()), None)
    return saved or None


def _own(tokenizer: PreTrainedTokenizerBase) -> Template:
    source = saved_source(tokenizer)
    if source is None:
        raise TemplateError(
            "data.template: auto, but this model's tokenizer has no chat template; "
            f"name one of {', '.join(names())}"
        )
    closing = Renderer(source, tokenizer).closing_token()
    stop = dict.fromkeys(token for token in (closing, tokenizer.eos_token) if token)
    return Template(AUTO, source, tuple(stop))


def _check_tokens(found: Bundled, tokenizer: PreTrainedTokenizerBase) -> None:
    if not found.stop and not tokenizer.eos_token:
        raise TemplateError(
            f"template {found.name!r} ends responses with the tokenizer's eos_token, but this "
            "tokenizer has none"
        )
    pieces = {token: tokenizer.encode(token, add_special_tokens=False) for token in found.tokens}
    if missing := [token for token, ids in pieces.items() if len(ids) != 1]:
        raise TemplateError(
            f"template {found.name!r} writes {', '.join(missing)}, which this tokenizer would "
            f"split into pieces; add model.new_special_tokens: [{', '.join(map(repr, missing))}] "
            "or choose another template"
        )


def _aliases() -> dict[str, str]:
    return {alias: name for name, found in bundled().items() for alias in found.aliases}


def _nearest(name: str) -> str:
    near = difflib.get_close_matches(name, [*names(), AUTO], n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    return f"{hint}; choose auto or one of {', '.join(names())}"


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
