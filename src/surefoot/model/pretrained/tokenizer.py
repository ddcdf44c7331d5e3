"""The tokenizer of a model folder or hub id, ready for training: fast, with a padding token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ...errors import ModelError
from ...storage.files import read_json

TOKENIZER_CONFIG = "tokenizer_config.json"
FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


def load_tokenizer(
    path: str | Path, *, trust_remote_code: bool = False, new_special_tokens: Sequence[str] = ()
) -> PreTrainedTokenizerBase:
    """Load a tokenizer and add special tokens that it does not have yet.

    Without a padding token, it pads with the end-of-sequence token; padding is always masked.

    Raises ``ModelError``: files missing or damaged, no Rust tokenizer, or no end-of-sequence token.
    """
    folder = Path(path)
    if folder.is_dir():
        _check_files(folder)
    elif folder.is_absolute():
        raise ModelError(f"{path}: no such folder, so no tokenizer in it")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), trust_remote_code=trust_remote_code)
    except Exception as error:  # the Rust side raises plain Exception for a damaged file
        raise ModelError(f"{path}: cannot load its tokenizer: {_cause(folder, error)}") from error
    if not tokenizer.is_fast:
        raise ModelError(
            f"{path}: {type(tokenizer).__name__} has no fast (Rust) version; "
            "save it as tokenizer.json first"
        )
    _complete(tokenizer, path)
    new = [t for t in dict.fromkeys(new_special_tokens) if t not in tokenizer.added_tokens_encoder]
    tokenizer.add_tokens([AddedToken(t, special=True, normalized=False) for t in new], True)
    return tokenizer


def _check_files(folder: Path) -> None:
    if not any((folder / name).is_file() for name in FILES):
        rest = ", ".join(FILES[1:])
        raise ModelError(f"{folder}: no tokenizer found; expected tokenizer.json (or {rest})")


def _complete(tokenizer: PreTrainedTokenizerBase, path: str | Path) -> None:
    if tokenizer.eos_token is None:
        raise ModelError(
            f"{path}: its tokenizer has no eos_token, so nothing would end a response; set one "
            "in tokenizer_config.json"
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token


def _cause(folder: Path, error: Exception) -> str:
    """The damaged file, if there is one; else the first line of the library's error."""
    for name in ("tokenizer.json", TOKENIZER_CONFIG):
        try:
            read_json(folder / name)
        except ValueError as damage:
            return f"{name} is damaged ({damage}); copy it again from the model"
        except OSError:
            continue
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(": ") if lines else type(error).__name__
