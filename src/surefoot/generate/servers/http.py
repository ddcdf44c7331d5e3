"""JSON over HTTP, with errors that name the address."""

from __future__ import annotations

import contextlib
import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from ...errors import RunError
from ...log import announced

_LONGEST = 300  # characters of an answer in a message


def exchange(url: str, body: Mapping[str, object] | None, seconds: float) -> str:
    """The answer to a POST of ``body``, or to a GET. Raises ``RunError``."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    is_question = body is None  # which a server that is up answers at once
    wait = announced("%s, for up to %g s (timeout)", url, seconds)
    try:
        with (
            wait if is_question else contextlib.nullcontext(),
            urllib.request.urlopen(request, timeout=seconds) as answer,
        ):
            return str(answer.read().decode(errors="replace"))
    except urllib.error.HTTPError as error:
        said = short(error.read().decode(errors="replace"))
        raise RunError(f"{url}: answered {error.code}: {said}") from None
    except urllib.error.URLError as error:
        raise RunError(f"{url}: {error.reason}") from None
    except (OSError, http.client.HTTPException) as error:
        raise RunError(f"{url}: {type(error).__name__}: {error}") from None


def exchange_json(url: str, body: Mapping[str, object] | None, seconds: float) -> Any:
    """The same, parsed."""
    text = exchange(url, body, seconds)
    try:
        return json.loads(text)
    except ValueError:
        raise RunError(f"{url}: expected JSON, got {short(text)}") from None


def short(text: str) -> str:
    """An answer, for messages."""
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
