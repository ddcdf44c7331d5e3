"""The tokenizer of a model folder or hub id, ready for training: fast, with a padding token."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.models.auto.tokenization_auto import MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS

from ..errors import ModelError, first_line
from ..storage.files import read_json

TOKENIZER_CONFIG = "tokenizer_config.json"
_NEW = "_surefoot_new_token_ids"
FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
# Each family of tokenizers splits one of these in its own way. None begins with a space or special
# token: behind these, the classes of SentencePiece models put spaces as they choose.
PROBES = (
    "Hello world",
    "it's DON'T we'll",
    "12345 1,234.5",
    "x = [1, -2]; // y != z",
    "a  b   c\td",
    "one\ntwo\n\nthree\r\n\n  four \n",
    "über naïve e\u0301 ﬁ ½",
    "x你好，世界。 こんにちは 안녕",
    "a🙂👍🏽 \u00a0b\u200bc",
)


def load_tokenizer(
    path: str | Path, *, trust_remote_code: bool = False, new_special_tokens: Sequence[str] = ()
) -> PreTrainedTokenizerBase:
    """Load a tokenizer and add special tokens that it does not have yet.

    Without a padding token, it pads with the end-of-sequence token; padding is always masked.

    Raises ``ModelError``: files missing or damaged, no Rust tokenizer, no end-of-sequence token, a
    class that tokenizes differently from the ``tokenizer.json``.
    """
    folder = Path(path)
    if folder.is_dir() and not any((folder / name).is_file() for name in FILES):
        rest = ", ".join(FILES[1:])
        raise ModelError(f"{folder}: no tokenizer found; expected tokenizer.json (or {rest})")
    if not folder.is_dir() and folder.is_absolute():
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
    _check_class(tokenizer, path)
    _complete(tokenizer, path)
    new = [t for t in dict.fromkeys(new_special_tokens) if t not in tokenizer.added_tokens_encoder]
    unknown = [token for token in new if token not in tokenizer.get_vocab()] if new else []
    tokenizer.add_tokens([AddedToken(t, special=True, normalized=False) for t in new], True)
    vars(tokenizer)[_NEW] = tokenizer.convert_tokens_to_ids(unknown)
    return tokenizer


def new_token_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens that ``load_tokenizer`` has added to those of the files. A model may have rows for
    them, which nothing has trained: many vocabularies are padded."""
    return list(vars(tokenizer).get(_NEW, ()))


def with_eos(tokenizer: PreTrainedTokenizerBase, token: str | None) -> PreTrainedTokenizerBase:
    """``tokenizer``, or a copy whose end-of-sequence token is ``token``."""
    if token in (None, tokenizer.eos_token):
        return tokenizer
    changed = copy.deepcopy(tokenizer)
    changed.eos_token = token
    return changed


def _check_class(tokenizer: PreTrainedTokenizerBase, path: str | Path) -> None:
    """Compare the tokenizer with ``tokenizer.json``, of which classes of transformers with an
    ``__init__`` of their own take the vocabulary only, and build the rest themselves."""
    kind = type(tokenizer)
    is_built = kind is not PreTrainedTokenizerFast and "__init__" in vars(kind)
    if not is_built or not kind.__module__.startswith("transformers."):
        return
    file = Path(path) / "tokenizer.json"
    if not file.is_file():
        return
    reference = Tokenizer.from_file(str(file))
    special = [str(t.content) for t in reference.get_added_tokens_decoder().values() if t.special]
    for text in (*PROBES, *special):
        (ids, tokens), (expected_ids, expected) = (
            _encoded(each, text) for each in (tokenizer.backend_tokenizer, reference)
        )
        if ids != expected_ids:
            raise ModelError(
                f"{path}: {kind.__name__}, which transformers chooses for this model, makes "
                f"{tokens} of {text!r}, and its tokenizer.json {expected}; "
                f"{_cure(file.parent, kind.__name__)}"
            )


def _encoded(tokenizer: Tokenizer, text: str) -> tuple[list[int], object]:
    """The ids of a text, and its tokens or why it has none."""
    try:
        encoding = tokenizer.encode(text, add_special_tokens=False)
    except Exception as error:  # Rust raises plain Exception where a text has no token
        return [], error
    real = [i for i, is_real in enumerate(encoding.attention_mask) if is_real]  # not padding
    return [encoding.ids[i] for i in real], [encoding.tokens[i] for i in real]


def _cure(folder: Path, name: str) -> str:
    """What decides about the tokenization, and what to write."""
    config = folder / "config.json"
    model_type = read_json(config).get("model_type") if config.is_file() else None
    save = f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
    if model_type in MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS:  # no file decides
        return (
            f"transformers takes {name} for all models of the type {model_type}, whatever "
            f"{TOKENIZER_CONFIG} says, so save what it makes and train with that: {save}"
        )
    return (
        f'if tokenizer.json is right, set "tokenizer_class": "PreTrainedTokenizerFast" in '
        f"{folder / TOKENIZER_CONFIG}; if {name} is right, save what it makes: {save}"
    )


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
    return first_line(error).rstrip(": ")
