"""A chat template that runs on symbolic texts, and so gives the rendering of any conversation.

It runs in Jinja as transformers configures it, with two differences: texts are not joined to
strings, and filters and tests are rejected unless they are known to read their input only by its
own methods and to hide no errors of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from itertools import groupby
from types import CodeType
from typing import NoReturn, cast

from jinja2 import Template, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .symbolic_text import Opaque, OpaqueText, Piece, Pieces, SymbolicRun

FILTERS = {"capitalize", "count", "d", "default", "first", "join", "last", "length", "list"}
FILTERS |= {"lower", "map", "reject", "rejectattr", "reverse", "select", "selectattr", "title"}
FILTERS |= {"upper"}
TESTS = {"!=", "==", "eq", "equalto", "even", "in", "ne", "odd"}
# These say the same of any string.
TYPES = {"boolean", "callable", "defined", "false", "float", "integer", "iterable", "mapping"}
TYPES |= {"none", "number", "sequence", "string", "true", "undefined"}

Test = Callable[[object], bool]


class Script:
    """A template that runs on symbolic texts, for one thread at a time. Raises
    ``jinja2.TemplateError`` if it is not valid."""

    def __init__(self, source: str) -> None:
        self._environment = _Environment()
        names = self._environment.make_globals(None)
        self._template = Template.from_code(self._environment, _compiled(source), names)
        names = {"str": _string, "str_join": self._environment.join_all}
        self._template.root_render_func.__globals__.update(names)

    def run(
        self, roles: Sequence[str], contents: Sequence[str], **variables: object
    ) -> SymbolicRun:
        """Run on a conversation, and record questions and output. Raises whatever a template may
        raise, and ``RefusedError`` if it cannot be followed."""
        run = self._environment.run = SymbolicRun(contents)
        messages = [
            {"role": role, "content": OpaqueText(run, (i,))} for i, role in enumerate(roles)
        ]
        context = self._template.new_context({"messages": messages, **variables})
        for block in self._template.root_render_func(context):
            start, text = len(run.pieces), cast(object, block)
            run.pieces += self._environment.pieces(text.text if isinstance(text, _Block) else text)
            if isinstance(text, _Block):
                run.bounds.append((start, len(run.pieces)))
        return run


@lru_cache(maxsize=64)
def _compiled(source: str) -> CodeType:
    return _Environment().compile(source)


@dataclass(frozen=True, slots=True)
class _Block:
    """The content of a generation block."""

    text: object


class _Generation(Extension):
    """``{% generation %}``: its content, as an object of its own."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja has it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("block"), [], [], body).set_lineno(line)

    def block(self, caller: Callable[[], object]) -> _Block:
        """Called by the template."""
        return _Block(caller())


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja for symbolic texts."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self) -> None:
        extensions = [_Generation, loopcontrols]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        self.run = SymbolicRun(())
        types = {name: _of_type(cast(Test, self.tests[name])) for name in TYPES}
        self.filters.update(dict.fromkeys(self.filters.keys() - FILTERS, self._refuse))
        self.filters.update(trim=_trim, string=_string)
        self.tests.update(dict.fromkeys(self.tests.keys() - TESTS, self._refuse), **types)
        self.globals.update(dict.fromkeys(["lipsum", "raise_exception"], self._refuse))
        self.globals["strftime_now"] = self._strftime_now

    def concat(self, texts: Iterable[object]) -> object:  # type: ignore[override]
        """Concatenated texts; a plain string if all are."""
        joined: list[Piece] = []
        every = [piece for text in texts for piece in self.pieces(text)]
        for is_plain, group in groupby(every, lambda piece: type(piece) is str):
            several = list(group)
            joined += ["".join(cast(list[str], several))] if is_plain else several
        if all(type(piece) is str for piece in joined):
            return joined[0] if joined else ""
        return OpaqueText(self.run, joined)

    def join_all(self, values: Iterable[object]) -> object:
        """Jinja's ``~``."""
        return self.concat(map(_string, values))

    def pieces(self, text: object) -> Pieces:
        """Convert a value that is written to text."""
        if isinstance(text, OpaqueText):
            return text._pieces
        if isinstance(text, _Block):  # in the midst of another text
            self.run.has_bounds = False
            return self.pieces(text.text)
        return (text,) if type(text) is str else self._refuse()

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        """An operator; only ``+`` accepts symbolic texts."""
        if not isinstance(left, Opaque) and not isinstance(right, Opaque):
            return super().call_binop(context, operator, left, right)
        return self.concat((left, right)) if operator == "+" else self._refuse()

    def getitem(self, obj: object, argument: object) -> object:
        """An item; not under a symbolic name."""
        return self._refuse() if isinstance(argument, Opaque) else super().getitem(obj, argument)

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        self.run.refuse()

    def _strftime_now(self, pattern: object) -> OpaqueText:
        return self.run.make(_now, (pattern,)) if type(pattern) is str else self._refuse()


def _string(value: object) -> object:
    return value if isinstance(value, OpaqueText) else str(value)


def _trim(value: object, chars: str | None = None) -> object:
    text = cast(str, _string(value))  # or opaque, which has the same method
    return text.strip() if chars is None else text.strip(chars)


def _of_type(test: Test) -> Test:
    """A test of types, for which a symbolic text is any string."""
    return lambda value: test("" if isinstance(value, OpaqueText) else value)


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
