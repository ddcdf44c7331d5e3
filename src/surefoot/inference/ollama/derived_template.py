"""A chat template in Go's language, made from what the Jinja template writes around messages.

Short conversations with marked contents show what stands before and after the messages of each
role. The template that is put together of it is rendered for other conversations and compared with
the Jinja template: one that differs is not used.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...data.text.templates.render import Renderer
from ...errors import TemplateError
from .go_template import quoted, render

Messages = list[dict[str, object]]
_MARKS = {"system": "Qs{}Zs", "user": "Qu{}Zu", "assistant": "Qa{}Za"}
_U, _A, _S = ("user", "assistant", "system")
_TEXTS = [
    "What is 2 + 2?",
    'A "quoted" text with {{ braces }} and {% more %}.',
    "Several\n\nlines\n  with space",
    "你好 é 🙂 <b>& </b>",
]
# Conversations that end where a response begins.
_SHAPES = [
    *([_U], [_S, _U], [_U, _A, _U], [_S, _U, _A, _U]),
    *([_U, _A, _U, _A, _U], [_S, _U, _A, _U, _A, _U, _A, _U]),
]


@dataclass(frozen=True)
class _Around:
    """What a template writes around messages."""

    start: str
    default: str  # instead of a system message
    system: tuple[str, str] | None  # around it; None: it stands in the first turn of the user
    in_user: str  # after it there
    user: tuple[str, str]
    assistant: tuple[str, str]
    prompt: str  # where a response begins


@dataclass(frozen=True)
class GoTemplate:
    """A proven template, and in what it differs from the model's own all the same."""

    source: str
    differences: tuple[str, ...] = ()


def go_template(renderer: Renderer, bos: str, *, is_added: bool) -> GoTemplate:
    """The template of ``renderer`` for Ollama, which writes the token ``bos`` before every prompt
    itself if ``is_added``. Raises ``TemplateError`` if it cannot be expressed."""
    first = bos if is_added else ""
    if "strftime_now" in renderer.source:
        raise TemplateError("it writes the date of today")
    source = _written(_around(renderer, bos, first))
    cases = [_conversation(shape, texts) for shape in _SHAPES for texts in _rotations()]
    for case in cases:
        if _by_ollama(source, case) != _by_jinja(renderer, case, first):
            raise TemplateError(
                f"it writes {_by_jinja(renderer, case, first)!r}, which a template of text around "
                "messages does not"
            )
    spaced = _conversation(_SHAPES[2], ["  a  ", "\nb\n"])
    differences = []
    if _by_ollama(source, spaced) != _by_jinja(renderer, spaced, first):
        differences.append("it strips white space around messages, Ollama's does not")
    thought = _conversation(_SHAPES[2], ["a", "<think>\nb\n</think>\n\nc"])
    if _by_ollama(source, thought) != _by_jinja(renderer, thought, first):
        differences.append("it omits the thoughts of earlier responses, Ollama's does not")
    return GoTemplate(source, tuple(differences))


def _rotations() -> list[list[str]]:
    return [_TEXTS[i:] + _TEXTS[:i] for i in range(len(_TEXTS))]


def _conversation(shape: Sequence[str], texts: Sequence[str]) -> Messages:
    pairs = zip(shape, itertools.cycle(texts), strict=False)
    return [{"role": role, "content": text} for role, text in pairs]


def _by_jinja(renderer: Renderer, messages: Messages, first: str) -> str:
    return renderer.render(messages, prompt=True).removeprefix(first)


def _by_ollama(source: str, messages: Messages) -> str:
    """As Ollama renders it: all system messages are also in ``.System``."""
    system = "\n\n".join(str(m["content"]) for m in messages if m["role"] == _S)
    turns = [{"Role": m["role"], "Content": m["content"]} for m in messages]
    return render(source, {"System": system, "Messages": turns})


def _around(renderer: Renderer, bos: str, first: str) -> _Around:
    """Found in four short conversations."""

    def pieces(*shape: str, prompt: bool = True) -> list[str]:
        marks = [_MARKS[role].format(number) for number, role in enumerate(shape)]
        messages: Messages = [
            {"role": role, "content": mark} for role, mark in zip(shape, marks, strict=True)
        ]
        text, found = renderer.render(messages, prompt=prompt), []
        for mark in marks:
            before, is_there, text = text.partition(mark)
            found.append(before)
            if not is_there:
                raise TemplateError("it does not write every message as it is")
        return [*found, text]

    begin, user_end = pieces(_U, prompt=False)
    answer_end = pieces(_U, _A, prompt=False)[2]
    turns = pieces(_U, _A, _U)
    user_begin = _after(turns[2], answer_end)
    answer_begin = _after(turns[1], user_end)
    prompt = _after(turns[3], user_end)
    system, in_user, start, default = _system(pieces, begin, user_begin, bos)
    if first and not start.startswith(first):
        raise TemplateError(f"it does not begin with {first!r}")
    return _Around(
        start.removeprefix(first),
        default,
        system,
        in_user,
        (user_begin, user_end),
        (answer_begin, answer_end),
        prompt,
    )


def _system(
    pieces: Callable[..., list[str]], begin: str, user_begin: str, bos: str
) -> tuple[tuple[str, str] | None, str, str, str]:
    """What stands around a system message; the start, and what stands for a missing one."""
    before = _before(begin, user_begin)
    try:
        head, middle = pieces(_S, _U)[:2]
    except TemplateError:  # it has no place for one
        return ("", ""), "", before, ""
    if head == begin:
        return None, middle, before, ""
    is_bare = not before or head.startswith(before)
    start = before if is_bare else bos if before.startswith(bos) and head.startswith(bos) else ""
    return (head.removeprefix(start), _before(middle, user_begin)), "", start, _after(before, start)


def _after(text: str, start: str) -> str:
    if not text.startswith(start):
        raise TemplateError("what it writes around a message depends on the messages around it")
    return text[len(start) :]


def _before(text: str, end: str) -> str:
    if not text.endswith(end):
        raise TemplateError("what it writes around a message depends on the messages around it")
    return text[: len(text) - len(end)]


def _written(around: _Around) -> str:
    """The Go template."""
    user, assistant = ([quoted(text) for text in pair] for pair in (around.user, around.assistant))
    parts = [quoted(around.start)]
    if around.default:
        parts.append("{{ if not .System }}" + quoted(around.default) + "{{ end }}")
    inner = ""
    if around.system is None:
        parts.append("{{ $system := .System }}")
        inner = "{{ if $system }}{{ $system }}" + quoted(around.in_user)
        inner += '{{ $system = "" }}{{ end }}'
    parts += [
        "{{ range $i, $_ := .Messages }}",
        "{{ $last := eq (len (slice $.Messages $i)) 1 }}",
        '{{ if eq .Role "user" }}' + user[0] + inner + "{{ .Content }}" + user[1],
        "{{ if $last }}" + quoted(around.prompt) + "{{ end }}",
        '{{ else if eq .Role "assistant" }}' + assistant[0] + "{{ .Content }}",
        "{{ if not $last }}" + assistant[1] + "{{ end }}",
    ]
    if around.system is not None and around.system != ("", ""):
        pair = [quoted(text) for text in around.system]
        parts.append('{{ else if eq .Role "system" }}' + pair[0] + "{{ .Content }}" + pair[1])
    return "".join([*parts, "{{ end }}{{ end }}"])
