"""Streaming detokenizer: token ids to text, so that only complete characters are shown.

A token may contain only some bytes of a character, or need the next one for its spaces. So text is
decoded from the last complete piece on, and held back while it ends in an incomplete character.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from transformers import PreTrainedTokenizerBase

Decode = Callable[[Sequence[int]], str]
HOLE = "\ufffd"  # what bytes that are no whole character decode to


def decoder(tokenizer: PreTrainedTokenizerBase) -> Decode:
    """Ids to the exact text of the model: special tokens shown, spaces unchanged."""

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))

    return decode


class TextStream:
    """Feed ids one by one; returns text as soon as it can no longer change."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._before: list[int] = []  # the last ids shown: context for what follows
        self._held: list[int] = []  # ids that are not shown yet

    def push(self, token_id: int) -> str:
        """The text that is now complete; often one word, sometimes nothing."""
        self._held.append(token_id)
        text = self._text()
        if not text or text.endswith(HOLE):
            return ""
        self._before, self._held = self._held, []
        return text

    def end(self) -> str:
        """The text that was held back, including incomplete characters."""
        text = self._text()
        self._before, self._held = [], []
        return text

    def _text(self) -> str:
        return self._decode(self._before + self._held)[len(self._decode(self._before)) :]
