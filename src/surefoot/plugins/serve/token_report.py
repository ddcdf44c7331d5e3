"""What a response says of its tokens: their log-probabilities, texts and bytes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from ...generate.decode import HOLE
from ...generate.live import Token
from .models import ServedModel

_LEAST = -9999.0  # OpenAI's number for what is impossible
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def chat_entry(model: ServedModel, token: Token, count: int) -> dict[str, object]:
    """An element of ``logprobs.content``, with ``count`` alternatives."""
    found = [_entry(model, *pair) for pair in token.alternatives[:count]]
    return {**_entry(model, token.id, token.logp), "top_logprobs": found}


def _entry(model: ServedModel, token_id: int, logp: float) -> dict[str, object]:
    tokenizer = model.opened.tokenizer
    text = model.exactly([token_id])
    data = token_bytes(tokenizer, token_id, text)
    return {"token": text, "logprob": max(logp, _LEAST), "bytes": list(data)}


def completion_logprobs(
    model: ServedModel, token: Token, offset: int, *, as_ids: bool
) -> tuple[dict[str, list[object]], int]:
    """``logprobs`` of a token of a completion, and where the text after it begins."""

    def name(number: int) -> str:
        return f"token_id:{number}" if as_ids else _shown(model, number)

    pairs = [*token.alternatives, (token.id, token.logp)]
    report: dict[str, list[object]] = {
        "tokens": [name(token.id)],
        "token_logprobs": [max(token.logp, _LEAST)],
        "top_logprobs": [{name(number): max(logp, _LEAST) for number, logp in pairs}],
        "text_offset": [offset],
    }
    return report, offset + len(model.exactly([token.id]))


def _shown(model: ServedModel, token_id: int) -> str:
    """The text of a token; its bytes in OpenAI's form, if they are no whole characters. Otherwise
    several tokens would have the same name."""
    text = model.exactly([token_id])
    if HOLE not in text:
        return text
    data = token_bytes(model.opened.tokenizer, token_id, text)
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def token_bytes(tokenizer: PreTrainedTokenizerBase, token_id: int, text: str) -> bytes:
    """The bytes of a token, which need not be whole characters."""
    piece = str(tokenizer.convert_ids_to_tokens(token_id))
    if token_id in tokenizer.added_tokens_decoder:
        return piece.encode()
    if found := _BYTE.fullmatch(piece):
        return bytes([int(found[1], 16)])
    letters = _letters()
    if HOLE in text and all(letter in letters for letter in piece):
        return bytes(letters[letter] for letter in piece)
    return text.encode()


@cache
def _letters() -> Mapping[str, int]:
    """The bytes by the letters with which byte-level tokenizers write them."""
    return {letter: byte for byte, letter in bytes_to_unicode().items()}
