"""Where the pictures of a row are: in a column, as part of a turn, at a mark in a text."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from io import BytesIO

from ....errors import DataError
from ...example import JSON, MEDIUM, Message
from .fields import EMPTY, Row, from_json, mark_unread

PICTURE = "<image>"  # LLaMA-Factory's mark
_INSIDE = ("bytes", "path", "url", "image", "image_url")  # keys of a picture that is an object
# Words in the name of a key that says how a picture is to be seen, such as Qwen's ``max_pixels``.
_SIZES = re.compile(r"pixels|resize|crop|rotat|frames|fps|bbox|region", re.IGNORECASE)


def with_pictures(
    messages: tuple[Message, ...], row: Row, column: str | None
) -> tuple[Message, ...]:
    """The messages with the pictures of a column where they stand: at the marks ``<image>`` and at
    parts without a picture of their own, or, if there are none, before the first question, as TRL
    has it. Raises ``DataError``: there are more or fewer of them."""
    value = row.get(column) if column else None
    if value is None and not any(message.media for message in messages):
        return messages  # as nearly always
    if isinstance(value, str) and value.startswith("["):  # of a CSV file
        with suppress(DataError):  # a path
            value = from_json(value, f"column {column!r}")
    pictures = value if isinstance(value, list) else [] if value in EMPTY else [value]
    sources = [source_of(each, f"column {column!r}", row) for each in pictures]
    if sources or any(message.media for message in messages):
        for message in messages:
            if message.content.count(MEDIUM) != len(message.media):
                raise DataError("a text has the character U+F0002, which stands for a picture here")
    if sources or isinstance(value, list):  # without the column, a mark is text
        messages = tuple(map(_marked, messages))
    count = sum(message.media.count(None) for message in messages)
    users = [i for i, message in enumerate(messages) if message.role == "user"]
    if sources and users and not any(message.media for message in messages):
        first = messages[users[0]]
        added = replace(first, content=MEDIUM * len(sources) + first.content, media=tuple(sources))
        return (*messages[: users[0]], added, *messages[users[0] + 1 :])
    if count != len(sources):
        raise DataError(
            f"column {column!r} has {len(sources)} pictures, and the texts have {count} places for "
            f"them (marks {PICTURE} or parts without a picture of their own)"
        )
    rest = iter(sources)
    filled = []
    for message in messages:
        media = tuple(next(rest) if each is None else each for each in message.media)
        if media and message.role == "assistant":
            raise DataError(f"the mark {PICTURE} in an answer; a model writes no pictures")
        filled.append(replace(message, media=media) if media else message)
    return tuple(filled)


def source_of(value: object, where: str, row: Row) -> str | bytes:
    """A picture in a row: a path, a data URL, bytes, ``{"bytes", "path"}`` as ``datasets`` stores
    one, or a picture of Pillow. Raises ``DataError``: it is none of these."""
    if isinstance(value, str) and value.startswith("data:"):
        head, _, body = value.partition(",")
        try:
            if not head.endswith(";base64"):
                raise ValueError("no base64")
            return base64.b64decode(body, validate=True)
        except (ValueError, binascii.Error) as error:
            raise DataError(f"{where}: a data URL that cannot be decoded ({error})") from None
    if isinstance(value, Mapping):
        refuse_sizes(value, where)
        keys = [key for key in _INSIDE if value.get(key) is not None][:1]
        # the name of a file beside its bytes, as ``datasets`` stores both
        mark_unread(row, value, (*keys, "path") if keys == ["bytes"] else keys, "a picture")
        return source_of(value[keys[0]] if keys else None, where, row)
    if isinstance(value, str | bytes) and value:
        return value
    save = getattr(value, "save", None)
    if callable(save):
        buffer = BytesIO()
        save(buffer, format="PNG")
        return buffer.getvalue()
    expected = "a path, a data URL or the bytes of a picture"
    raise DataError(f"{where}: expected {expected}, got {type(value).__name__}")


def refuse_sizes(picture: JSON, where: str) -> None:
    """Raise ``DataError`` if an object with a picture says how large, or which part, is seen."""
    for key, value in picture.items():
        if _SIZES.search(key) and value not in EMPTY:
            raise DataError(
                f"{where}: {key!r} of a picture is not read: each is seen as its file is, within "
                "data.media.max_pixels; change the files, and remove the key"
            )


def _marked(message: Message) -> Message:
    """A message with each mark ``<image>`` as a picture that is not known yet."""
    if PICTURE not in message.content:
        return message
    own, media = iter(message.media), list[str | bytes | None]()
    for each in re.findall(f"{PICTURE}|{MEDIUM}", message.content):
        media.append(None if each == PICTURE else next(own))
    content = message.content.replace(PICTURE, MEDIUM)
    return replace(message, content=content, media=tuple(media))
