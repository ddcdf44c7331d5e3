"""``dataset_info.json``: the datasets, where their rows are, and how to read them.

The file is LLaMA-Factory's, read strictly: an entry that is used may contain no unknown key.
Columns and tags that an entry does not list keep their usual names, unlike in LLaMA-Factory.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from ...errors import DataError, did_you_mean
from ...storage import files
from ...storage.remote import Address, is_address
from ..example import JSON, BrokenRow
from ._readers import TextUnit
from ._remote_rows import Hub, HubName, remote_files
from ._row_sources import RowSource, find_files
from .formats import FORMATS, Format
from .formats._alpaca import Alpaca
from .formats._token_ids import TokenIds
from .formats._trl import TRL
from .formats._turns import OpenAI, ShareGPT
from .formats.fields import Row, shown, structure, unique_keys

FILE = "dataset_info.json"
DEFAULT = "alpaca"  # formatting of an entry that has columns
TURN_TAGS = ("role_tag", "content_tag", "user_tag", "assistant_tag")
TAGS = {*TURN_TAGS, "observation_tag", "function_tag", "system_tag"}
SOURCES = ("file_name", "cloud_file_name", "hf_hub_url", "ms_hub_url")
FILES = SOURCES[:2]  # read as they are, with no hub
HUBS: Mapping[HubName, str] = {"huggingface": "hf_hub_url", "modelscope": "ms_hub_url"}
HUB_KEYS = ("subset", "folder")  # say which part of a hub dataset is meant
KINDS: Mapping[str, type] = {  # of the values of an entry
    **dict.fromkeys((*SOURCES, *HUB_KEYS, "split", "formatting"), str),
    **{"ranking": bool, "num_samples": int, "columns": dict, "tags": dict},
}
RANKING_COLUMNS = ("chosen", "rejected")
FORM_KEYS = ("formatting", "ranking", "columns", "tags")  # say what rows look like
REFUSED = {
    "om_hub_url": "the OpenMind hub is not read; use hf_hub_url, ms_hub_url or a local file",
    "script_url": "a script can run any code, so it is not run; let it write its rows to a JSON "
    "file once, and give that as file_name",
}
WORDS = {str: "text", bool: "true or false", int: "a whole number", dict: "an object"}
MEDIA = ("videos", "audios", "image", "video", "audio")
OBJECTS = "objects"  # ms-swift's column of boxes and names, which marks in the texts stand for
OFF = (*MEDIA, OBJECTS)  # columns that an entry may only switch off
# Columns that no form of rows is recognized by: an entry that names these alone leaves the rest to
# the rows.
SHARED = {*OFF, "images", "system", "tools", "kto_tag"}
LOOK, MOST = 20, 1000  # rows; the larger number if a column of the first ones has only nulls
RESPONSES = ("output", "response", "completion", "answer")
PROMPTS = ("instruction", "prompt", "question")
MARKS = ("label", "kto_tag")
FORMS = (  # the usual columns of each form, for errors
    *("messages", "conversations", "instruction, output", "prompt, completion"),
    *("prompt, completion, label", "prompt, chosen, rejected", "text", "input_ids"),
)


@dataclass(frozen=True)
class DatasetEntry:
    """One dataset: its source, and the format of its rows."""

    name: str
    source: RowSource
    format: Format
    columns: tuple[str, ...]  # the names of columns its rows must have
    named: tuple[str, ...] = ()  # columns that the entry mentions, by its names and theirs
    alone: Format | None = None  # of a conversation or response that pairs have beside the two
    num_samples: int | None = None  # use only so many rows, drawn at random

    def limit(self, max_samples: int | None) -> int | None:
        """How many rows are read from the beginning where none are drawn."""
        limits = (n for n in (max_samples, self.num_samples) if n is not None)
        return min(limits, default=None)

    def describe(self) -> str:
        """Everything except the content of the files that determines the examples."""
        # as before rows had pictures, so that caches of text are still found
        form = str(self.format).replace("images='images', ", "")
        return f"{form} {self.columns} {self.num_samples}"


def read_entry(
    name: str,
    entry: object,
    folder: Path,
    where: str,
    hub: HubName = "huggingface",
    text_unit: TextUnit = "file",
) -> DatasetEntry:
    """A dataset as an entry describes it. ``file_name`` is relative to ``folder``; errors begin
    with ``where``. ``hub`` is the one that counts if an entry names several. Without
    ``formatting``, ``columns`` and the like, the first rows show what they are. Raises
    ``DataError``: the entry is invalid."""
    raw = _checked(entry, where)
    source, count = _source(raw, folder, where, hub, text_unit), raw.get("num_samples")
    if _leaves_form(raw):
        columns = first_values(source.rows())
        seen = _format(columns)
        if seen is not None and not ("columns" in raw and Alpaca.prompt in columns):
            form = _form(raw, where, seen)
            return DatasetEntry(name, source, *form, num_samples=count, alone=_alone(columns, seen))
    return DatasetEntry(name, source, *_form(raw, where), num_samples=count)


def _leaves_form(raw: Mapping[str, Any]) -> bool:
    """Whether an entry leaves it to the rows what they look like."""
    is_said = any(key in raw for key in FORM_KEYS if key != "columns")
    return not is_said and set(raw.get("columns", {})) <= SHARED


def read_form(entry: object, where: str) -> list[tuple[Format, tuple[str, ...]]]:
    """The formats that the rows of an entry may have, and the columns that they must have, whether
    its file is there or not; none if it says nothing of them. Raises as ``read_entry`` does."""
    raw = _checked(entry, where)
    if not any(key in raw for key in FORM_KEYS):
        return []
    kinds = [kind() for kind in FORMATS.values() if _reads_pictures(kind)]
    return [_form(raw, where, kind)[:2] for kind in (kinds if _leaves_form(raw) else [None])]


def _form(
    raw: Mapping[str, Any], where: str, seen: Format | None = None
) -> tuple[Format, tuple[str, ...], tuple[str, ...]]:
    """The format of an entry, its columns, and all that it mentions; ``seen`` is what its rows look
    like, where it leaves that to them."""
    kind, ranking = raw.get("formatting") or DEFAULT, bool(raw.get("ranking"))
    if seen is not None:
        kind, ranking = next(k for k, each in FORMATS.items() if type(seen) is each), seen.ranking
    if kind not in FORMATS:
        hint, format_names = did_you_mean(kind, FORMATS), ", ".join(FORMATS)
        raise DataError(f"{where}.formatting: expected one of {format_names}, got {kind!r}{hint}")
    names = _names(raw, "columns", kind, where) | _names(raw, "tags", kind, where)
    for column in RANKING_COLUMNS:
        if names.get(column) and not ranking:
            raise DataError(f'{where}.columns.{column}: is read only with "ranking": true')
    read = {key: column for key, column in names.items() if key not in OFF}
    if "image" in names and seen is not None and getattr(seen, "images", None) == "image":
        read["images"] = None
    settings: dict[str, Any] = {**read, "ranking": ranking}
    data_format: Format = replace(seen or FORMATS[kind](), **settings)
    mentioned = (*names, *(column for column in names.values() if column))
    return data_format, columns_of(names, data_format), mentioned


def read_registry(path: Path) -> JSON:
    """The entries of a ``dataset_info.json`` by name, each to be checked when it is used. Raises
    ``DataError``: it is not a JSON object."""
    with files.reading(DataError, str(path)):
        try:
            raw = json.loads(files.read_file(path), object_pairs_hook=unique_keys)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}: not valid JSON: {error}") from None
    return _object(raw, str(path))


def _object(value: object, where: str) -> JSON:
    if not isinstance(value, dict):
        raise DataError(f"{where}: expected an object, got {shown(value)}")
    return value


def _checked(entry: object, where: str) -> dict[str, Any]:
    """An entry without nulls, with known keys whose values are of the right types."""
    raw = _object(entry, where)
    for key in raw.keys() - KINDS.keys() - REFUSED.keys():
        hint = did_you_mean(key, KINDS) or f" (known: {', '.join(KINDS)})"
        raise DataError(f"{where}: unknown key {key!r}{hint}")
    source_keys = [key for key in SOURCES if key in raw]
    refused = [key for key in REFUSED if key in raw]
    if not source_keys and refused:
        raise DataError(f"{where}: {refused[0]}: {REFUSED[refused[0]]}")
    if source_keys and source_keys[0] in FILES and len(source_keys) > 1:
        raise DataError(f"{where}: give either {source_keys[0]} or {source_keys[1]}, not both")
    checked: dict[str, Any] = {k: v for k, v in raw.items() if v is not None and k in KINDS}
    for key, value in checked.items():
        if type(value) is not KINDS[key]:  # True is an int, but no number here
            expected = WORDS[KINDS[key]]
            raise DataError(f"{where}.{key}: expected {expected}, got {shown(value)}")
    if checked.get("num_samples", 1) < 1:
        raise DataError(f"{where}.num_samples: must be at least 1, got {checked['num_samples']}")
    return checked


def _names(raw: Mapping[str, Any], key: str, kind: str, where: str) -> dict[str, str | None]:
    """An entry's names for the columns or the tags of its format."""
    where = f"{where}.{key}"
    listed = raw.get(key, {})
    names = {field.name for field in fields(FORMATS[kind])} - {"ranking"}
    allowed = dict.fromkeys(sorted(names & TAGS if key == "tags" else names - TAGS))
    for name, value in listed.items():
        if name in OFF and value is not None:
            raise DataError(
                f"{where}.{name}: only text and pictures (columns: images) are supported, not "
                f"{name}; null leaves them out"
            )
        if name not in allowed and name not in OFF:
            words = ", ".join(allowed) or f"no {key}"
            hint = did_you_mean(name, allowed) or f" ({kind} has {words})"
            raise DataError(f"{where}: unknown name {name!r}{hint}")
        is_needed = key == "tags" or name == FORMATS[kind].main
        if not (isinstance(value, str) and value) and (value is not None or is_needed):
            raise DataError(f"{where}.{name}: expected a name, got {shown(value)}")
    return {name: None if value is None else str(value) for name, value in listed.items()}


def columns_of(names: Mapping[str, str | None], data_format: Format) -> tuple[str, ...]:
    """The columns that rows must have: those listed, and the main one."""
    main = getattr(data_format, data_format.main)
    listed = [main, *(names[name] for name in names if name not in TAGS)]
    return tuple(dict.fromkeys(name for name in listed if name))


def _source(
    raw: Mapping[str, Any], folder: Path, where: str, hub: HubName, text_unit: TextUnit
) -> RowSource:
    key = next((key for key in FILES if raw.get(key)), "file_name")
    for chosen in (hub, *HUBS):  # the first one that the entry names
        if repository := raw.get(HUBS[chosen]):
            subset, part = (raw.get(key) for key in HUB_KEYS)
            return Hub(chosen, repository, subset, raw.get("split") or "train", part)
    if not raw.get(key):
        raise DataError(f"{where}: needs a file_name, hf_hub_url or ms_hub_url to read rows from")
    for name in HUB_KEYS:
        if raw.get(name):
            raise DataError(
                f"{where}.{name}: only hub datasets have one, and this entry has a file_name"
            )
    if is_address(raw[key]):
        if raw.get("split", "train") != "train":
            raise DataError(f"{where}.split: a file has no splits; leave split out")
        return remote_files(Address(raw[key]), text_unit)
    try:
        return find_files(folder / raw[key], raw.get("split"), text_unit)
    except DataError as error:
        raise DataError(f"{where}.{key}: {error}") from None


def recognized(rows: Iterable[Row | BrokenRow]) -> Format | None:
    """The format of the first ``rows``; None if they are broken, absent, or of no known form."""
    return _format(first_values(rows))


def first_values(rows: Iterable[Row | BrokenRow]) -> dict[str, object]:
    """The columns of the first rows with the first value of each, None of those that have none."""
    columns: dict[str, object] = {}
    for count, row in enumerate(rows, 1):
        if not isinstance(row, BrokenRow):
            columns |= {k: v for k, v in row.items() if columns.get(k) is None}
        if count >= LOOK and (count >= MOST or None not in columns.values()):
            break
    return columns


def _format(columns: Row) -> Format | None:
    """The format of rows with these columns."""
    form = _form_by_columns(columns)
    is_single = "image" in columns and columns.get("images") is None
    # LLaVA's, and many on the hub: one picture
    if form is None or not is_single or not _reads_pictures(type(form)):
        return form
    return replace(form, images="image")  # type: ignore[arg-type]


def _reads_pictures(kind: type[Format]) -> bool:
    return any(field.name == "images" for field in fields(kind))


def _form_by_columns(columns: Row) -> Format | None:
    row = {name: value for name, value in columns.items() if value is not None}
    if row.get("chosen") is not None and row.get("rejected") is not None:
        return _ranking(row)
    for name in ("messages", "conversations"):
        if name in row:
            return _conversations(row, name)
    return _single(row, columns) or (TokenIds() if TokenIds.main in row else None)


def _ranking(row: Row) -> Format:
    """The format of rows with two responses."""
    chosen, prompt = row["chosen"], next((name for name in PROMPTS if name in row), None)
    is_answer = not isinstance(chosen, list) or len(chosen) <= 1
    if prompt == "instruction" and isinstance(chosen, str):
        return Alpaca(ranking=True)
    for name in ("messages", "conversations"):
        if name in row and is_answer and not _ends_in_response(row, name):
            return replace(_conversations(row, name), ranking=True)
    if prompt == "question" and isinstance(chosen, str):
        return Alpaca(prompt=prompt, query=_query(row), ranking=True)
    return TRL(prompt=prompt, ranking=True)


def _alone(columns: Row, form: Format) -> Format | None:
    """The format of a conversation or a response that pairs in ``form`` have beside them."""
    rest = {name: value for name, value in columns.items() if name not in RANKING_COLUMNS}
    names = {name for name in ("messages", "conversations", *RESPONSES) if rest.get(name)}
    names -= {getattr(form, "messages", None)}
    return _format(rest) if form.ranking and names else None


def _ends_in_response(row: Row, name: str) -> bool:
    """Whether a conversation is complete, and so no prompt of two responses."""
    turns = structure(row, name)
    last = turns[-1] if isinstance(turns, list) and turns else None
    role = last.get("role") or last.get("from") if isinstance(last, Mapping) else None
    return role in ("assistant", "gpt")


def _conversations(row: Row, name: str) -> OpenAI | ShareGPT:
    """The format of rows with turns."""
    turns = structure(row, name)
    first = turns[0] if isinstance(turns, list) and turns else None
    is_sharegpt = "from" in first if isinstance(first, Mapping) else name == "conversations"
    return ShareGPT(messages=name) if is_sharegpt else OpenAI(messages=name)


def _single(row: Row, columns: Row) -> Format | None:
    """The format of rows with one response in a column of its own, or of plain text. ``columns``
    has those without a value, too: a response is one where all that were seen are null."""
    prompt = next((name for name in PROMPTS if name in row), None)
    responses = (name for some in (row, columns) for name in RESPONSES if name in some)
    response = next(responses, "output")
    if prompt == "prompt" and response == "completion":
        mark = next((name for name in MARKS if isinstance(row.get(name), bool)), None)
        return TRL(kto_tag=mark)
    if isinstance(row.get("prompt"), list):
        return TRL()
    if prompt:
        return Alpaca(prompt=prompt, response=response, query=_query(row))
    return Alpaca(prompt="text", query=None) if "text" in row else None


def _query(row: Row) -> str:
    """The column of further input to a question."""
    return "context" if "context" in row and "input" not in row else "input"
