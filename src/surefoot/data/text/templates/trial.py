"""The process that tries a template: it renders conversations, given on stdin, within limits.

It is run by its path and imports Jinja alone, so that it starts in a tenth of a second.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

NO_MEMORY = 3  # exit code


class GenerationTag(Extension):
    """``{% generation %}``, which marks what an assistant says: its body."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The nodes of the body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def main() -> int:
    """Render every conversation; the exit code. An error of a template is reported
    where it is used."""
    task = json.load(sys.stdin)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (task["seconds"], task["seconds"] + 1))
    if (taken := _address_space()) is not None:
        resource.setrlimit(resource.RLIMIT_AS, (taken + task["memory"],) * 2)
    try:
        template = _environment().from_string(task["source"])
        for names in task["conversations"]:
            _render(template, names)
    except MemoryError:
        return NO_MEMORY
    except Exception:
        return 0
    return 0


def _render(template: Template, names: Mapping[str, object]) -> None:
    try:
        template.render(names)
    except MemoryError:
        raise
    except Exception:
        return


def _environment() -> ImmutableSandboxedEnvironment:
    """What transformers gives a template: ``utils/chat_template_utils.py``."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(value: object, ensure_ascii: bool = False, **options: object) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)  # type: ignore[arg-type]


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _address_space() -> int | None:
    """Bytes of address space of this process; None where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        return None
    return pages * resource.getpagesize()


if __name__ == "__main__":
    sys.exit(main())
