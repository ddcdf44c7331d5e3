"""YAML to plain data with the position of every key, and back. The only module that uses
ruamel.yaml.

YAML 1.2: ``1e-4`` is a number, ``no`` is text. Duplicate keys, tags, and excessive nesting or
repetition are rejected.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.composer import Composer
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError
from ruamel.yaml.representer import SafeRepresenter

from ..errors import RecipeError
from ..schema import Keys, Problem

MAX_DEPTH = 32  # a recipe is four levels deep
MAX_NODES = 5000  # a recipe has about a hundred; aliases of aliases grow exponentially
TAG = "tag:yaml.org,2002:"
_HALF = re.compile("[\ud800-\udfff]")


Mark = tuple[int, int]  # line and column, from 1


@dataclass(frozen=True)
class Document:
    """A recipe as it was written: plain data with the position of every key; ``overrides``
    have precedence over ``marks``."""

    data: object
    name: str = ""
    marks: Mapping[Keys, Mark] = field(default_factory=dict)
    overrides: Mapping[Keys, str] = field(default_factory=dict)  # path -> the argument it came from
    overridden: frozenset[Keys] = frozenset()  # the settings whose values come from overrides

    def error(self, problems: Sequence[Problem]) -> RecipeError:
        """All ``problems`` in reading order, each with its position."""
        placed = sorted(problems, key=lambda problem: self._mark(problem.path) or (0, 0))
        return RecipeError("\n".join(f"{self._place(p.path)}{p}" for p in placed))

    def _place(self, path: Keys) -> str:
        covering = [way for way in self.overrides if path[: len(way)] == way]
        inside = [way for way in self.overrides if path and way[: len(path)] == path]
        if covering or inside:
            return f"{self.overrides[max(covering, key=len) if covering else inside[-1]]}: "
        mark = self._mark(path)
        if mark is None:
            return f"{self.name}: " if self.name else ""
        return f"{self.name}:{mark[0]}:{mark[1]} "

    def _mark(self, path: Keys) -> Mark | None:
        """The position of ``path``, or of the nearest part of the recipe."""
        ways = (path[:length] for length in range(len(path), -1, -1))
        return next((self.marks[way] for way in ways if way in self.marks), None)


def parse(text: str, name: str = "") -> Document:
    """Read one YAML document. ``name`` precedes ``:line:column`` in messages.

    Raises:
        RecipeError: it is not YAML, or not plain: every duplicate key, tag and odd key is named.
    """
    return _composed(text, name, _scalar)


def _composed(text: str, name: str, read: Callable[[Node], object]) -> Document:
    builder = _Builder(read)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an anchor used twice
            yaml = YAML(typ="safe", pure=True)
            yaml.Composer = _Composer
            node = yaml.compose(io.StringIO(text))
        data = None if node is None else builder.build(node, (), 0)
    except YAMLError as error:
        raise RecipeError(_syntax(error, name, text)) from None
    except RecursionError:
        raise RecipeError(f"{name}: nested too deeply for a recipe") from None
    document = Document(data, name, builder.marks)
    if builder.problems:
        raise document.error(builder.problems)
    return document


def parse_argument(text: str, name: str, *, as_written: bool = False) -> object:
    """A value of a command line, or the same with every scalar ``as_written``, so that ``007`` is
    not 7. ``#`` begins no comment there.

    Raises:
        RecipeError: as of ``parse``.
    """
    # A character of Unicode's private use: ruamel has no switch for comments.
    stand_in = next(char for char in map(chr, range(0xE000, 0xF8FF)) if char not in text)
    read = _as_written if as_written else _scalar
    data = _composed(text.replace("#", stand_in), name, read).data
    return json.loads(json.dumps(data, ensure_ascii=False).replace(stand_in, "#"))


def parse_text(text: str) -> str | None:
    """Text of a command line: as it is, unless all of it is quoted, or says null."""
    if text in ("", "null", "~"):
        return None
    if text[0] in "'\"":
        with contextlib.suppress(RecipeError):  # such as 'a' and 'b'
            data = parse_argument(text, "")
            return data if isinstance(data, str) else text
    return text


def emit(data: object) -> str:
    """Plain data as YAML, in block style but for lists, that ``parse`` gives back."""
    yaml = YAML(typ="safe", pure=True)
    yaml.Representer = _Representer
    yaml.default_flow_style = False
    yaml.allow_unicode = True
    # In the order of the sections, not of the alphabet.
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    yaml.width = 1_000_000  # one setting, one line
    stream = io.StringIO()
    yaml.dump(data, stream)
    return stream.getvalue()


def edited(text: str, keys: Sequence[str], value: object) -> str:
    """``text`` with the setting ``keys`` set to ``value``, or removed if that is None; comments and
    everything else stay. A section without settings goes with its last one.

    Raises:
        RecipeError: ``text`` is not a YAML mapping.
    """
    parse(text)  # what it refuses is not edited
    yaml = YAML(typ="rt", pure=True)
    yaml.preserve_quotes = True
    yaml.width = 1_000_000  # a line that nobody edited keeps its bytes, however long it is
    try:
        root = yaml.load(text)
    except ValueError:  # it converts what parse() leaves as text, such as 5,000 digits
        raise RecipeError("a number in it has too many digits; quote it") from None
    root = CommentedMap() if root is None else root
    if not isinstance(root, CommentedMap):
        raise RecipeError("expected sections such as model: {...}")
    if value is None:
        _remove(root, keys)
    else:
        _put(root, keys, value)
    stream = io.StringIO()
    if root:
        yaml.dump(root, stream)
    return stream.getvalue()


def _put(root: CommentedMap, keys: Sequence[str], value: object) -> None:
    section = root
    for key in keys[:-1]:
        below = section.get(key)
        if not isinstance(below, CommentedMap):  # such as a variant's bare name
            below = section[key] = CommentedMap()
        section = below
    section[keys[-1]] = value


def _remove(section: CommentedMap, keys: Sequence[str]) -> None:
    below = section.get(keys[0])
    if len(keys) > 1 and isinstance(below, CommentedMap):
        _remove(below, keys[1:])
        if below:
            return
    elif len(keys) > 1:
        return
    section.pop(keys[0], None)


class _Representer(SafeRepresenter):
    """Lists on one line, text of several lines quoted, numbers as older readers accept them."""

    def represent_list(self, data: list[object]) -> SequenceNode:
        """``[a, b]``."""
        return self.represent_sequence(f"{TAG}seq", data, flow_style=True)

    def represent_str(self, data: str) -> ScalarNode:
        """Plain where that reads back as text; ruamel overlooks a leading sign."""
        style = '"' if not data.isprintable() or data.startswith((":", "?")) else None
        return self.represent_scalar(f"{TAG}str", data, style=style)

    def represent_float(self, data: float) -> ScalarNode:
        """``1.0e-08``: without the point, YAML 1.1 reads it as text."""
        digits, e, exponent = repr(data).partition("e")
        text = f"{digits}.0e{exponent}" if e and "." not in digits else repr(data)
        return self.represent_scalar(f"{TAG}float", text.replace("inf", ".inf"))


_Representer.add_representer(float, _Representer.represent_float)
_Representer.add_representer(list, _Representer.represent_list)
_Representer.add_representer(str, _Representer.represent_str)


def _refuse_excess(depth: int, num_nodes: int, mark: object) -> None:
    if depth > MAX_DEPTH or num_nodes > MAX_NODES:
        problem = "nested or repeated far beyond what a recipe needs"
        raise MarkedYAMLError(problem=problem, problem_mark=mark)


class _Composer(Composer):
    """Stops at the first node that no recipe has: 140 kB of them took 6 s of a server's time."""

    num_nodes = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """The next node of the text."""
        self.num_nodes += 1
        _refuse_excess(self.depth, self.num_nodes, self.parser.peek_event().start_mark)
        return super().compose_node(parent, index)


@dataclass
class _Builder:
    """Converts nodes to plain data, and records positions and problems."""

    read: Callable[[Node], object]  # a scalar
    marks: dict[Keys, Mark] = field(default_factory=lambda: {(): (1, 1)})
    problems: list[Problem] = field(default_factory=list)
    num_nodes: int = 0

    def build(self, node: Node, path: Keys, depth: int) -> object:
        self.num_nodes += 1
        _refuse_excess(depth, self.num_nodes, node.start_mark)  # of aliases, every use
        if isinstance(node, MappingNode):
            self._refuse_tag(node, path, ("map",))
            return self._mapping(node, path, depth)
        if isinstance(node, SequenceNode):
            self._refuse_tag(node, path, ("seq",))
            return [self._item(item, (*path, i), depth) for i, item in enumerate(node.value)]
        self._refuse_tag(node, path, tuple(SCALARS) + TEXTS)
        if _HALF.search(node.value):  # nothing can be written with it: no file, no path, no request
            self._refuse(path, "half of a character, such as \\ud83d without what follows it")
        return self.read(node)

    def _mapping(self, node: MappingNode, path: Keys, depth: int) -> dict[str, object]:
        values: dict[str, object] = {}
        for key_node, value_node in node.value:
            is_word = isinstance(key_node, ScalarNode)
            key = str(key_node.value) if is_word else "?"  # YAML's own sign for such a key
            here, mark = (*path, key), _mark(key_node)
            if not is_word:
                self._refuse(here, "a key must be a word, got a list or a mapping")
            elif key in values:
                lines = f"in line {self.marks[here][0]} and in line {mark[0]}"
                self._refuse(here, f"given twice, {lines}; keep one")
            self.marks.setdefault(here, mark)
            values[key] = self.build(value_node, here, depth + 1)
        return values

    def _item(self, node: Node, path: Keys, depth: int) -> object:
        self.marks[path] = _mark(node)
        return self.build(node, path, depth + 1)

    def _refuse_tag(self, node: Node, path: Keys, names: tuple[str, ...]) -> None:
        if node.tag not in [TAG + name for name in names]:
            shown = str(node.tag).replace(TAG, "!!")
            self._refuse(path, f"tags have no meaning in a recipe, got {shown}")

    def _refuse(self, path: Keys, message: str) -> None:
        self.problems.append(Problem(path, message))


def _bool(text: str) -> bool:
    return text.lower() in ("true", "yes", "on", "y")  # the others only after %YAML 1.1


def _int(text: str) -> int:
    digits = text.replace("_", "")
    is_prefixed = digits.lstrip("+-")[:2].lower() in ("0b", "0o", "0x")
    # 010 is ten in YAML 1.2, and eight in 1.1.
    return int(digits, 0 if is_prefixed else 10)


def _float(text: str) -> float:
    digits = text.replace("_", "").lower()
    return float(digits.replace(".", "") if digits.endswith(("inf", "nan")) else digits)


SCALARS = {"null": lambda _: None, "bool": _bool, "int": _int, "float": _float}
TEXTS = ("str", "timestamp", "value", "merge")  # a date is text to us


def _scalar(node: Node) -> object:
    read = SCALARS.get(str(node.tag).removeprefix(TAG), str)
    try:
        return read(node.value)
    except ValueError:  # "1__": what looks like a number but is none; reading says what is expected
        return str(node.value)


def _as_written(node: Node) -> object:
    return None if node.tag == f"{TAG}null" else str(node.value)


def _mark(node: Node) -> Mark:
    return node.start_mark.line + 1, node.start_mark.column + 1


def _syntax(error: YAMLError, name: str, text: str) -> str:
    """A syntax error with its position, in one line."""
    if isinstance(error, ReaderError):
        before = text[: error.position]
        line, column = before.count("\n") + 1, error.position - before.rfind("\n")
        return f"{name}:{line}:{column} not YAML: unprintable character #x{error.character:04x}"
    if not isinstance(error, MarkedYAMLError):
        return f"{name}: not YAML: {error}"
    mark = error.problem_mark or error.context_mark
    place = f"{name}:{mark.line + 1}:{mark.column + 1} " if mark else f"{name}: "
    message = ": ".join(part for part in (error.context, error.problem) if part)
    return f"{place}not YAML: {message}{_advice(message)}"


def _advice(message: str) -> str:
    """The usual cause of an error of the parser."""
    if "'\\t'" in message:
        return " (indent with spaces, not with tabs)"
    if "mapping values are not allowed" in message:
        return " (quote a text that contains ': ', or check the indentation of this line)"
    if "cannot start any token" in message:
        return " (quote a text that starts with a special character)"
    return ""
