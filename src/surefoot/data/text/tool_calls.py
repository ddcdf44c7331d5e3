"""Tool calls in a response: one function for each syntax in which families write them.

``families/tools`` writes what is read here. An environment of rollouts may use
``parse_tool_calls`` for what the policy says.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from ..example import JSON

WRONG = (ValueError, KeyError, TypeError, AttributeError, SyntaxError, RecursionError, MemoryError)
_THOUGHT = re.compile(r"\A.*(?:</(?:seed:)?think>|◁/think▷|<channel\|>)", re.DOTALL)
_QUOTE = '<|"|>'


@dataclass(frozen=True, slots=True)
class ToolCalls:
    """A response: what it says beside calls, its calls, and those that cannot be read."""

    text: str
    calls: tuple[JSON, ...] = ()  # [{"name": ..., "arguments": {...}}]
    broken: tuple[str, ...] = ()


Types = Mapping[str, Mapping[str, object]]  # of the parameters of each function
Read = Callable[[str, Types], Iterator[JSON]]


@dataclass(frozen=True, slots=True)
class Syntax:
    """Where calls stand in a response, and how the text of a match is read."""

    pattern: str
    read: Read
    openings: tuple[str, ...]  # how calls begin
    is_at_start: bool = False  # whether that is at the beginning of the answer only


def parse_tool_calls(
    response: str, syntax: str | None = None, tools: Sequence[JSON] = ()
) -> ToolCalls:
    """The tool calls of a response.

    Args:
        response: its text, special tokens included, without the token that ends it.
        syntax: a name of ``SYNTAXES``; the one that the response is written in if None.
        tools: the schemas of the functions. Where a syntax does not say whether a value is text,
            the schema does.
    """
    syntax = syntax_of(response) if syntax is None else syntax
    if syntax is None:
        return ToolCalls(response)
    pattern, read = SYNTAXES[syntax].pattern, SYNTAXES[syntax].read
    thought = _THOUGHT.match(response)
    start, types = len(thought[0]) if thought else 0, _types(tools)
    calls: list[JSON] = []
    broken: list[str] = []
    for match in re.finditer(pattern, response[start:], re.DOTALL):
        try:
            calls += read(match[1], types)
        except WRONG:
            broken.append(match[0])
    text = response[:start] + re.sub(pattern, "", response[start:], flags=re.DOTALL)
    return ToolCalls(text.strip() if calls or broken else response, tuple(calls), tuple(broken))


def syntax_of(text: str) -> str | None:
    """The syntax of tool calls that a chat template, or a response, writes; None if it is none."""
    return next((name for mark, name in MARKS if re.search(mark, text, re.DOTALL)), None)


def _types(tools: Sequence[JSON]) -> Types:
    types_by_function: dict[str, Mapping[str, object]] = {}
    for tool in tools:
        function = cast(Mapping[str, object], tool.get("function", tool))
        parameters = cast(Mapping[str, object], function.get("parameters") or {})
        properties = cast(Mapping[str, JSON], parameters.get("properties") or {})
        types = {name: schema.get("type") for name, schema in properties.items()}
        types_by_function[str(function["name"])] = types
    return types_by_function


def _call(value: object, key: str = "arguments") -> JSON:
    """A call in JSON, its arguments under ``key``."""
    call = cast(Mapping[str, object], value)
    arguments = call[key]
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(call["name"], str) or not isinstance(arguments, Mapping):
        raise ValueError
    return {"name": call["name"], "arguments": arguments}


def _objects(text: str, _types: Types) -> Iterator[JSON]:
    """An object, or a list of objects."""
    value = json.loads(text)
    for call in value if isinstance(value, list) else [value]:
        yield _call(call, "parameters" if "parameters" in call else "arguments")


def _lines(text: str, _types: Types) -> Iterator[JSON]:
    for line in filter(str.strip, text.splitlines()):
        yield _call(json.loads(line))


def _named(text: str, _types: Types) -> Iterator[JSON]:
    """A name, and its arguments in the next line."""
    name, _, arguments = text.partition("\n")
    yield _call({"name": name.strip(), "arguments": json.loads(arguments)})


def _actions(text: str, _types: Types) -> Iterator[JSON]:
    name, _, arguments = text.partition("Action Input:")
    yield _call({"name": name.strip(), "arguments": json.loads(arguments.strip().strip("`"))})


def _tagged(name: str, value: str) -> Read:
    """Pairs between tags: patterns of a function's name and body, and of a parameter."""

    def read(text: str, types: Types) -> Iterator[JSON]:
        functions = re.findall(name, text, re.DOTALL)
        if not functions:
            raise ValueError
        for function, body in functions:
            value_types = types.get(function, {})
            pairs = re.findall(value, body, re.DOTALL)
            arguments = {key: _value(raw, value_types.get(key)) for key, raw in pairs}
            yield {"name": function, "arguments": arguments}

    return read


def _value(raw: str, kind: object) -> object:
    """A value without quotes: text if the schema says so, or if it is no JSON."""
    if kind == "string":
        return raw
    try:
        return json.loads(raw)
    except ValueError:
        return raw


def _python(text: str, _types: Types) -> Iterator[JSON]:
    """Calls of Python: ``[name(key="value")]``."""
    body = ast.parse(text.strip(), mode="eval").body
    for node in body.elts if isinstance(body, ast.List) else [body]:
        call = cast(ast.Call, node)
        name = cast(ast.Name, call.func).id
        if call.args:
            raise ValueError
        arguments = {str(key.arg): _literal(key.value) for key in call.keywords}
        yield {"name": name, "arguments": arguments}


def _literal(node: ast.expr) -> object:
    """A literal of Python or of JSON."""
    if isinstance(node, ast.Name):
        return {"true": True, "false": False, "null": None}[node.id]
    if isinstance(node, ast.List):
        return [_literal(each) for each in node.elts]
    if isinstance(node, ast.Dict):
        keys = [ast.literal_eval(key) for key in node.keys if key is not None]
        return dict(zip(keys, map(_literal, node.values), strict=True))
    return ast.literal_eval(node)


def _gemma(text: str, _types: Types) -> Iterator[JSON]:
    """``name{key:<|"|>value<|"|>}``: JSON with bare keys, and a token for quotes."""
    name, _, body = text.partition("{")
    pieces = ("{" + body + "}").split(_QUOTE)
    for i, piece in enumerate(pieces):
        bare = re.sub(r"([{,]\s*)([\w-]+)(\s*:)", r'\1"\2"\3', piece)
        pieces[i] = json.dumps(piece, ensure_ascii=False) if i % 2 else bare
    yield {"name": name, "arguments": json.loads("".join(pieces))}


def _between(opening: str, closing: str, read: Read) -> Syntax:
    """Calls between two words, the second of which may be missing at the end."""
    pattern = rf"{re.escape(opening)}(.*?)(?:{re.escape(closing)}|\Z)"
    return Syntax(pattern, read, (opening,))


_JSON_CALL = _between("<tool_call>", "</tool_call>", _objects)
_ACTION = Syntax(r"Action:(.*?)(?=Action:|\Z)", _actions, ("Action:",))
_PARAMETER = r"<parameter=([^>]+)>\n?(.*?)\n?</parameter>"
_FUNCTION = r"<function=\s*([^\s<>]+)>?(.*?)</function>"
_ARGUMENT = r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>"
_INVOKE = r'<invoke name="(.*?)">(.*?)</invoke>'
_NAMED = r'<parameter name="(.*?)">(.*?)</parameter>'
SYNTAXES: Mapping[str, Syntax] = {
    "default": _ACTION,
    "gemma4": Syntax(r"<\|tool_call>call:(.*?)\}?(?:<tool_call\|>|\Z)", _gemma, ("<|tool_call>",)),
    "glm4": Syntax(r"\A\s*([\w.-]+\n\s*\{.*\})\s*\Z", _named, ("",), is_at_start=True),
    "glm4_moe": replace(_JSON_CALL, read=_tagged(r"\A\s*([^\s<]+)(.*)\Z", _ARGUMENT)),
    "lfm2": _between("<|tool_call_start|>", "<|tool_call_end|>", _python),
    "ling": _JSON_CALL,
    "llama3": Syntax(
        r'\A\s*(?:<\|python_tag\|>\s*)?([\[{].*"(?:parameters|arguments)".*)',
        _objects,
        ("<|python_tag|>", "{", "["),
        is_at_start=True,
    ),
    "minimax1": _between("<tool_calls>", "</tool_calls>", _lines),
    "minimax2": _between("<minimax:tool_call>", "</minimax:tool_call>", _tagged(_INVOKE, _NAMED)),
    "mistral": Syntax(r"\[TOOL_CALLS\]\s*(.*)", _objects, ("[TOOL_CALLS]",)),
    "phi4_mini": _ACTION,
    "qwen": _JSON_CALL,
    "qwen3_5": replace(_JSON_CALL, read=_tagged(_FUNCTION, _PARAMETER)),
    "seed_oss": _between("<seed:tool_call>", "</seed:tool_call>", _tagged(_FUNCTION, _PARAMETER)),
}
MARKS = (  # what a syntax is known by, in templates and in responses
    (r"<seed:tool_call>", "seed_oss"),
    (r"<minimax:tool_call>", "minimax2"),
    (r"<tool_calls>", "minimax1"),
    (r"<\|tool_call_start\|>", "lfm2"),
    (r"<\|tool_call>", "gemma4"),
    (r"\[TOOL_CALLS\]", "mistral"),
    (r"<tool_call>\s*(?:\\n)?<function=", "qwen3_5"),
    (r"<arg_key>", "glm4_moe"),
    (r"<tool_call>", "qwen"),
    (r"Action Input:", "default"),
    (r"在调用上述函数时", "glm4"),
    (r'"name":.{0,120}"parameters":', "llama3"),
)
