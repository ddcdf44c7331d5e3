"""The faster way from conversations to ids and labels, behind two functions.

Neither changes what the model sees: both give what Jinja and the tokenizer's offsets give, or leave
it to these. Without them, encoding reaches 0.6 of the speed of the Rust tokenizer (decision 37).
"""

from .token_alignment import Known, token_aligner
from .traced_template import fast_renderer

__all__ = ["Known", "fast_renderer", "token_aligner"]
