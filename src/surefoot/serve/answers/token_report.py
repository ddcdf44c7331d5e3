"""What a response says of its tokens: their log-probabilities, texts and bytes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache, partial

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from ...generate.decode import HOLE
from ...generate.live import Token
from ..running.models import ServedModel

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
    model: ServedModel, tokens: Sequence[Token], offset: int, *, as_ids: bool
) -> tuple[dict[str, list[object]], int]:
    """``logprobs`` of a completion, and where the text after these tokens begins."""
    name = partial(name_of, model, as_ids=as_ids)
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(model.exactly([token.id]))
    tops = [
        {name(one): max(logp, _LEAST) for one, logp in (*t.alternatives, (t.id, t.logp))}
        for t in tokens
    ]
    found: dict[str, list[object]] = {
        "tokens": [name(token.id) for token in tokens],
        "token_logprobs": [max(token.logp, _LEAST) for token in tokens],
        "top_logprobs": [*tops],
        "text_offset": [*offsets],
    }
    return found, offset


def name_of(model: ServedModel, token_id: int, *, as_ids: bool) -> str:
    """A token in ``logprobs`` of a completion."""
    return f"token_id:{token_id}" if as_ids else _shown(model, token_id)


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


def usage_of(num_prompt: int, num_completion: int) -> dict[str, int]:
    """Tokens of prompts, each counted once, and of all responses, with the tokens that end them."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
    }
