"""Questions with several choices, from a file of rows or from a folder of MMLU, C-Eval or CMMLU."""

from __future__ import annotations

import csv
import io
import json
import string
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from ...data.rows.row_sources import BrokenRow, Files
from ...errors import DataError

LETTERS = string.ascii_uppercase
SPLITS = {"test": "test", "validation": "val", "train": "dev"}  # and their folders
MAPPING = "mapping.json"
_TABLES = (".json", ".jsonl", ".ndjson", ".csv", ".parquet", ".arrow")


@dataclass(frozen=True)
class ChoiceQuestion:
    """A question with its choices, the letters A, B, C and so on."""

    origin: str
    subject: str
    question: str
    choices: tuple[str, ...]
    answer: int | None  # the number of the right choice; None: not published

    @property
    def letter(self) -> str:
        """That of the right choice, or nothing."""
        return "" if self.answer is None else LETTERS[self.answer]


@dataclass(frozen=True)
class Benchmark:
    """Questions, the examples that precede them, and what their subjects are called."""

    name: str
    questions: Sequence[ChoiceQuestion]
    examples: Mapping[str, Sequence[ChoiceQuestion]] = field(default_factory=dict)  # by subject
    titles: Mapping[str, str] = field(default_factory=dict)  # in prompts
    categories: Mapping[str, str] = field(default_factory=dict)

    def title(self, subject: str) -> str:
        """The name of a subject in a prompt."""
        return self.titles.get(subject, subject.replace("_", " "))


def read_benchmark(path: Path, *, split: str = "test", examples: Path | None = None) -> Benchmark:
    """The questions of ``path``: a file of rows (``question``, ``choices``, ``answer``,
    ``subject``), with the rows of ``examples`` to precede them; or a folder with ``mapping.json``
    and CSV files (in a zip archive or not), of which ``train`` is the split of examples.

    Raises ``DataError``: a file is missing or a row is invalid.
    """
    if path.is_dir():
        if examples is not None:
            raise DataError(f"--examples {examples}: {path} has its own, in the folder dev")
        return _folder(path, split)
    if not path.is_file():
        raise DataError(f"--questions {path}: there is no such file or folder")
    found = list(_rows(path))
    before: dict[str, list[ChoiceQuestion]] = {}
    for one in _rows(examples) if examples is not None else ():
        if one.answer is None:
            raise DataError(f"{one.origin}: an example needs its answer")
        before.setdefault(one.subject, []).append(one)
    if examples is not None and (alone := {one.subject for one in found} - before.keys()):
        raise DataError(f"--examples {examples}: has none for the subject {min(alone)!r}")
    return Benchmark(path.stem, found, before)


def _rows(path: Path) -> Iterator[ChoiceQuestion]:
    """The questions of a file."""
    if not path.is_file():
        raise DataError(f"--examples {path}: there is no such file")
    if path.suffix.lower() not in _TABLES:
        raise DataError(f"{path}: expected a file of rows: {', '.join(_TABLES)}")
    count = 0
    for index, row in enumerate(Files((path,)).rows()):
        origin = f"{path}: row {index}"
        if isinstance(row, BrokenRow):
            raise DataError(f"{origin}: {row.reason}")
        count += 1
        yield _question(row, origin)
    if not count:
        raise DataError(f"{path}: contains no question")


def _question(row: Mapping[str, object], origin: str) -> ChoiceQuestion:
    question = row.get("question")
    if not isinstance(question, str) or not question.strip():
        keys = ", ".join(row) or "none"
        raise DataError(f"{origin}: expected the text of a question (keys found: {keys})")
    choices = _choices(row, origin)
    answer = _answer(row.get("answer"), choices, origin)
    return ChoiceQuestion(origin, str(row.get("subject") or ""), question, choices, answer)


def _choices(row: Mapping[str, object], origin: str) -> tuple[str, ...]:
    """A list, a list in JSON (of a CSV file), or a column for each letter."""
    given = row.get("choices")
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError:
            raise DataError(f"{origin}: 'choices' is not a list in JSON: {given!r}") from None
    if given is None:
        columns = (row.get(letter) for letter in LETTERS)
        given = [one for one in columns if one is not None]
    if not isinstance(given, list) or not 2 <= len(given) <= len(LETTERS):
        raise DataError(
            f"{origin}: expected 'choices', a list of 2 to {len(LETTERS)}, or columns A, B, ..."
        )
    return tuple(str(one) for one in given)


def _answer(given: object, choices: Sequence[str], origin: str) -> int | None:
    """A letter, the text of a choice, or its number from 0 (not as text)."""
    if given is None or given == "":
        return None
    letters = LETTERS[: len(choices)]
    meant = set[int]()
    if isinstance(given, int) and not isinstance(given, bool):
        meant = {given} if 0 <= given < len(choices) else set()
    elif isinstance(given, str):
        text = given.strip()
        meant = {i for i, one in enumerate(choices) if one.strip() == text}
        meant |= {letters.index(text.upper())} if text.upper() in tuple(letters) else set()
    if len(meant) != 1:
        problem = "names several choices" if meant else "names no choice"
        raise DataError(
            f"{origin}: the answer {given!r} {problem}; write a letter of {', '.join(letters)}, "
            "or a whole number from 0"
        )
    return meant.pop()


def _folder(path: Path, split: str) -> Benchmark:
    """A benchmark in the form of LLaMA-Factory's folder ``evaluation``."""
    subjects = _mapping(path / MAPPING)
    read = _tables(path)
    found: list[ChoiceQuestion] = []
    before: dict[str, Sequence[ChoiceQuestion]] = {}
    for subject in subjects:
        found += read(subject, split)
        before[subject] = read(subject, "train")
    titles = {name: one["name"] for name, one in subjects.items()}
    categories = {name: one["category"] for name, one in subjects.items()}
    return Benchmark(path.absolute().name, found, before, titles, categories)


def _mapping(path: Path) -> dict[str, dict[str, str]]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise DataError(
            f"--questions {path.parent}: contains no {MAPPING}; expected a folder such as "
            "LLaMA-Factory's evaluation/mmlu, or a file of rows"
        ) from None
    except ValueError as error:
        raise DataError(f"{path}: not valid JSON: {error}") from None
    is_right = isinstance(found, dict) and found
    if not is_right or not all(
        isinstance(one, dict) and {"name", "category"} <= one.keys() for one in found.values()
    ):
        raise DataError(f"{path}: expected a name and a category for each subject")
    return dict(found)


def _tables(folder: Path) -> Callable[[str, str], list[ChoiceQuestion]]:
    """Reads the questions of a subject and a split from the CSV files in ``folder``, or in its
    archive."""
    archives = sorted(folder.glob("*.zip"))
    archive = zipfile.ZipFile(archives[0]) if archives else None
    if archive is not None:
        names = archive.namelist()
    else:
        names = [str(one.relative_to(folder)) for one in sorted(folder.rglob("*.csv"))]
    known = {PurePosixPath(name).parts[-2:]: name for name in names if name.endswith(".csv")}

    def read(subject: str, split: str) -> list[ChoiceQuestion]:
        part = SPLITS[split]
        files = [known.get((part, f"{subject}{end}.csv")) for end in (f"_{part}", "")]
        name = next((one for one in files if one is not None), None)
        place = archives[0] if archive is not None else folder
        if name is None:
            raise DataError(
                f"{place}: contains no {part}/{subject}_{part}.csv; the splits are "
                f"{', '.join(_splits(known))}"
            )
        content = (folder / name).read_bytes() if archive is None else archive.read(name)
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise DataError(f"{place}/{name}: is not UTF-8 (byte {error.start})") from None
        return list(_of_table(text, f"{place}/{name}", subject))

    return read


def _splits(known: Mapping[tuple[str, ...], str]) -> list[str]:
    parts = {folder for folder, *_ in known}
    return [split for split, folder in SPLITS.items() if folder in parts]


def _of_table(text: str, place: str, subject: str) -> Iterator[ChoiceQuestion]:
    """The rows of a CSV file, with a head or, as in MMLU, without."""
    rows = [row for row in csv.reader(io.StringIO(text, newline="")) if row]
    names = [name.strip().lower() for name in rows[0]] if rows else []
    if "question" in names and "a" in names:
        first, rows = 1, rows[1:]
    else:
        first, names = (
            0,
            ["question", *LETTERS[: len(rows[0]) - 2].lower(), "answer"] if rows else [],
        )
    for number, row in enumerate(rows, start=first + 1):
        origin = f"{place}: row {number}"
        if len(row) != len(names):
            raise DataError(f"{origin}: has {len(row)} columns, the first one {len(names)}")
        fields = dict(zip(names, row, strict=True))
        columns = [fields[letter] for letter in LETTERS.lower() if letter in fields]
        letter = fields.get("answer", "").strip().upper()
        if letter and letter not in LETTERS[: len(columns)]:
            raise DataError(f"{origin}: the answer {letter!r} is no letter of a choice")
        answer = LETTERS.index(letter) if letter else None
        yield ChoiceQuestion(origin, subject, fields["question"], tuple(columns), answer)
