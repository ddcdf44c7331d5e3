"""The part of Go's text/template that our Ollama templates use, to prove them before they are used.

Actions: fields, variables, ``if``/``else if``/``else``, ``range`` over a list, and the functions
``eq ne and or not len slice``. Everything else is an error, never a guess.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...errors import TemplateError

_ACTION = re.compile(r"\{\{(- )?(.*?)( -)?\}\}", re.DOTALL)
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|\(|\)|:=|=|,|\$?[\w.]*[\w.]|\$')
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "and": lambda *given: next((one for one in given if not one), given[-1]),
    "or": lambda *given: next((one for one in given if one), given[-1]),
    "not": lambda one: not one,
    "len": len,
    "slice": lambda items, start: items[start:],
}


@dataclass
class _Block:
    """An ``if`` or ``range``: pairs of a condition and what follows it; the last may have none."""

    head: str
    branches: list[tuple[list[str], list[Any]]] = field(default_factory=list)


@dataclass
class _Scope:
    """The data, the dot, and the variables."""

    root: Mapping[str, Any]
    dot: Any
    variables: dict[str, Any]


def quoted(text: str) -> str:
    """``text`` outside of actions; braces that would begin one are written by one."""
    return text.replace("{{", '{{ "{{" }}')


def render(template: str, data: Mapping[str, Any]) -> str:
    """The text of a template. Raises ``TemplateError`` for what is not of the subset."""
    nodes = _parse(_pieces(template))
    return "".join(_run(nodes, _Scope(data, data, {})))


def _pieces(template: str) -> Iterator[str | list[str]]:
    """Texts, and the tokens of each action."""
    at, trims = 0, False
    for found in _ACTION.finditer(template):
        text = template[at : found.start()]
        text = text.lstrip(" \t\r\n") if trims else text
        yield text.rstrip(" \t\r\n") if found[1] else text
        yield _TOKEN.findall(found[2])
        at, trims = found.end(), bool(found[3])
    rest = template[at:]
    yield rest.lstrip(" \t\r\n") if trims else rest


def _parse(pieces: Iterator[str | list[str]]) -> list[Any]:
    """Nodes: texts, actions and blocks."""
    top: list[Any] = []
    stack: list[tuple[_Block | None, list[Any]]] = [(None, top)]
    for piece in pieces:
        block, body = stack[-1]
        if isinstance(piece, str):
            body.append(piece)
        elif piece[:1] in (["if"], ["range"]):
            opened = _Block(piece[0], [(piece[1:], [])])
            body.append(opened)
            stack.append((opened, opened.branches[0][1]))
        elif piece[:1] == ["else"] and block is not None:
            block.branches.append((piece[2:], []))
            stack[-1] = (block, block.branches[-1][1])
        elif piece == ["end"] and block is not None:
            stack.pop()
        else:
            body.append(piece)
    if len(stack) > 1:
        raise TemplateError("a block of the Go template has no end")
    return top


def _run(nodes: Sequence[Any], scope: _Scope) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, str):
            yield node
        elif isinstance(node, _Block):
            yield from (_loop if node.head == "range" else _choose)(node, scope)
        elif node[1:2] in ([":="], ["="]):
            scope.variables[node[0]] = _value(node[2:], scope)
        else:
            yield str(_value(node, scope))


def _choose(block: _Block, scope: _Scope) -> Iterator[str]:
    for condition, body in block.branches:
        if not condition or _value(condition, scope):
            yield from _run(body, scope)
            return


def _loop(block: _Block, scope: _Scope) -> Iterator[str]:
    condition, body = block.branches[0]
    names: list[str] = []
    if ":=" in condition:
        names = [name for name in condition[: condition.index(":=")] if name != ","]
        condition = condition[condition.index(":=") + 1 :]
    for number, item in enumerate(_value(condition, scope)):
        scope.variables |= dict(zip(names, (number, item), strict=False))
        yield from _run(body, _Scope(scope.root, item, scope.variables))


def _value(tokens: Sequence[str], scope: _Scope) -> Any:
    """A pipeline: one operand, or a function and its arguments."""
    found, rest = _operands(list(tokens), scope)
    if rest:
        raise TemplateError(f"unexpected {rest[0]!r} in a Go template")
    if callable(found[0]):
        return found[0](*found[1:])
    if len(found) != 1:
        raise TemplateError(f"{' '.join(tokens)}: not of the subset of Go templates")
    return found[0]


def _operands(tokens: list[str], scope: _Scope) -> tuple[list[Any], list[str]]:
    found: list[Any] = []
    while tokens and tokens[0] != ")":
        token = tokens.pop(0)
        if token == "(":
            inner, rest = _operands(tokens, scope)
            tokens = rest[1:]
            found.append(inner[0](*inner[1:]) if callable(inner[0]) else inner[0])
        else:
            found.append(_operand(token, scope))
    return found, tokens


def _operand(token: str, scope: _Scope) -> Any:
    if token.startswith('"'):
        return json.loads(token)
    if token.isdigit():
        return int(token)
    if token in _FUNCTIONS:
        return _FUNCTIONS[token]
    if token.startswith("$."):
        return scope.root[token[2:]]
    if token in scope.variables:
        return scope.variables[token]
    if token.startswith(".") and token[1:] in scope.dot:
        return scope.dot[token[1:]]
    raise TemplateError(f"{token!r} is not of the subset of Go templates")
