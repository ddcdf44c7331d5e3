"""Arguments of a chat template, such as ``enable_thinking``, written into it as its defaults.

So the template that is saved with the weights renders as in training wherever it is used, and a
caller can still pass another value.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from difflib import get_close_matches

from ....errors import TemplateError

logger = logging.getLogger(__name__)

GIVEN = ("messages", "tools", "documents", "add_generation_prompt")  # by what renders it
_NAME = re.compile(r"[A-Za-z_]\w*")


def with_arguments(source: str, arguments: Mapping[str, object], template: str) -> str:
    """``source`` with defaults for the names in ``arguments``; ``template`` is its name.

    Raises ``TemplateError``: the template does not use one of them.
    """
    known = set(_NAME.findall(source))
    for name in arguments:
        if name not in known or name in GIVEN:
            near = get_close_matches(name, known, n=1, cutoff=0.8)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise TemplateError(
                f"chat template {template!r} has no argument {name!r}{hint}, so data.{_key(name)} "
                "would change nothing; remove it, or choose another data.template"
            )
    return "".join(_default(name, value) for name, value in arguments.items()) + source


def check_row_arguments(source: str, arguments: Mapping[str, object], template: str) -> None:
    """Warn of arguments of a row that ``source`` does not use. Raises ``TemplateError``: one has
    the name of what is given by whatever renders it."""
    known = set(_NAME.findall(source))
    for name in arguments:
        if name in GIVEN:
            raise TemplateError(f"chat_template_kwargs: {name!r} is no argument of a row")
        if name not in known:
            logger.warning(
                "chat template %r has no argument %r, so chat_template_kwargs of a row changes "
                "nothing",
                template,
                name,
            )


def _key(name: str) -> str:
    own = ("enable_thinking", "preserve_thinking")
    return name if name in own else f"chat_template_kwargs.{name}"


def _default(name: str, value: object) -> str:
    return f"{{%- set {name} = {name} if {name} is defined else {_literal(value)} +%}}"


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
