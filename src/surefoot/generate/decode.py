"""Streaming detokenizer: token ids to text, so that only complete characters are shown.

A token may contain only some bytes of a character, or need the next one for its spaces. So text is
decoded from the last complete piece on, and held back while it ends in an incomplete character.

A stop text ends a response, wherever in a token it begins and ends. What may be its beginning is
held back, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from transformers import PreTrainedTokenizerBase

Decode = Callable[[Sequence[int]], str]
HOLE = "\ufffd"  # what bytes that are no whole character decode to


def decoder(tokenizer: PreTrainedTokenizerBase, *, hides_special: bool = False) -> Decode:
    """Ids to the exact text of the model: special tokens shown (or hidden), spaces unchanged."""
    options = {"clean_up_tokenization_spaces": False, "skip_special_tokens": hides_special}

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), **options))

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

    @property
    def begun(self) -> str:
        """The complete characters of what is held back."""
        return self._text().rstrip(HOLE) if self._held else ""

    def end(self) -> str:
        """The text that was held back, including incomplete characters."""
        text = self._text()
        self._before, self._held = [], []
        return text

    def _text(self) -> str:
        return self._decode(self._before + self._held)[len(self._decode(self._before)) :]


class TextUntil:
    """The text of a response up to the first of some stop texts. Feed ids one by one."""

    def __init__(self, decode: Decode, stop: Sequence[str]) -> None:
        self._stream, self._stop = TextStream(decode), tuple(stop)
        self._longest = max(map(len, self._stop), default=0)
        self._num_shown = 0
        self.text = ""  # complete characters, without the stop text
        self.has_ended = False  # by a stop text

    def push(self, token_id: int) -> bool:
        """Add a token; whether it completes a stop text."""
        start = max(0, len(self.text) - self._longest + 1)  # what is before has been searched
        self.text += self._stream.push(token_id)
        seen = self.text + self._stream.begun
        if found := [at for one in self._stop if (at := seen.find(one, start)) >= 0]:
            self.text, self.has_ended = seen[: min(found)], True
        return self.has_ended

    def pop(self) -> str:
        """The text to show since the last call: no stop text can begin in it."""
        return self._shown(len(self.text) - (0 if self.has_ended else self._num_held()))

    def end(self) -> str:
        """The rest of the text, including incomplete characters, once there are no more tokens."""
        if not self.has_ended:
            self.text += self._stream.end()
        return self._shown(len(self.text))

    def _shown(self, end: int) -> str:
        piece, self._num_shown = self.text[self._num_shown : end], end
        return piece

    def _num_held(self) -> int:
        """Characters at the end that may be the beginning of a stop text."""
        sizes = ((n, one[:n]) for one in self._stop for n in range(1, len(one)))
        return max((n for n, start in sizes if self.text.endswith(start)), default=0)
