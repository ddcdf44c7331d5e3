"""The tokens that end a response of an exported model."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from ...data.section import without_datasets
from ...data.text.codec import Codec
from ...data.text.templates import load_template, saved_source


def stop_token_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Those of the tokenizer's own chat template; none without one."""
    if not saved_source(tokenizer):
        return ()
    template = load_template("auto", tokenizer)
    return Codec(tokenizer, template, without_datasets()).stop_token_ids
