"""Text that is about to be published: without secrets, and without folders of this machine."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ...errors import counted

REMOVED = "<removed>"
TEXT = (".json", ".jsonl", ".yaml", ".yml", ".md", ".txt", ".jinja", ".Modelfile")
VOCABULARY = ("tokenizer.json", "vocab.json", "merges.txt", "added_tokens.json")
MAX_BYTES = 64 << 20  # of a text that is searched
_SECRETS = re.compile(
    r"\bhf_[A-Za-z0-9]{20,}"
    r"|\bms-[0-9a-f]{8}-[0-9a-f-]{20,}"
    r"|\bsk-[A-Za-z0-9_-]{20,}"
    r"|\bgh[pousr]_[A-Za-z0-9]{30,}"
    r"|\bAKIA[0-9A-Z]{16}\b"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?-----END [A-Z ]*PRIVATE KEY-----"
    r"|(?<=://)[^\s/:@]+:[^\s/@]+(?=@)"
)
_NAMES = re.compile(r"(TOKEN|SECRET|PASSWORD|API_KEY|ACCESS_KEY)$")
_HOMES = r"/(?:home|Users)/[^/\s\"']+|/root"
_REST = r"((?:/[^/\s\"',;`)\]}]+)*)/?"
_BEFORE = r"(?<![\w./~:-])"


@dataclass(frozen=True)
class Redaction:
    """What must not appear in a text: values of secrets, and folders of this machine."""

    secrets: tuple[str, ...]
    folders: tuple[str, ...]

    def apply(self, text: str) -> tuple[str, int]:
        """``text`` without them, and the number of secrets. Of a path its last part is kept."""
        text, number = _SECRETS.subn(REMOVED, text)
        for value in self.secrets:
            number += text.count(value)
            text = text.replace(value, REMOVED)
        known = "|".join([*map(re.escape, self.folders), _HOMES])
        return re.sub(f"{_BEFORE}(?:{known})(?![^/\\s\"',;`)\\]}}]){_REST}", _last, text), number

    def reads(self, name: str, size: int) -> bool:
        """Whether a file of that name is text. A vocabulary is left as it is."""
        path = Path(name)
        is_text = path.suffix in TEXT or path.name == "Modelfile"
        return is_text and path.name not in VOCABULARY and size <= MAX_BYTES

    def cleaned(self, name: str, data: bytes) -> tuple[bytes, str | None]:
        """A file of that name without them, and what to tell its owner."""
        if not self.reads(name, len(data)):
            return data, None
        try:
            text, number = self.apply(data.decode())
        except UnicodeDecodeError:
            return data, None
        told = (
            f"{name}: {counted(number, 'secret was', 'secrets were')} removed" if number else None
        )
        return text.encode(), told


def redaction_of(folders: Iterable[Path], environment: Mapping[str, str] = os.environ) -> Redaction:
    """Secrets of the environment; this user's folder, the current one, and ``folders``."""
    values = {v for name, v in environment.items() if _NAMES.search(name) and len(v) >= 8}
    roots = {Path.home(), Path.cwd(), Path(tempfile.gettempdir()), *folders}
    found = {str(root) for root in roots} | {str(root.resolve()) for root in roots}
    longest = sorted((f for f in found if len(Path(f).parts) > 1), key=len, reverse=True)
    return Redaction(tuple(sorted(values)), tuple(longest))


def _last(found: re.Match[str]) -> str:
    """The last part of a path, which is not the name of its user."""
    return found[1].rpartition("/")[2] or "."
