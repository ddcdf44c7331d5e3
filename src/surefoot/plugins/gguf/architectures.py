"""The architectures that can be written as GGUF: one row each.

A row says what llama.cpp's graph of that name takes for granted. A model that differs from it is
refused, since it would load and give other answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from transformers import PretrainedConfig

from ...errors import ModelError

_ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class GGUFArchitecture:
    """One row: how a ``model_type`` of transformers is written, and what llama.cpp assumes."""

    name: str
    """``general.architecture`` of the file."""
    activation: str = "silu"
    biased: tuple[str, ...] = ()
    """The projections that may have a bias."""
    is_permuted: bool = False
    """Rotary pairs are adjacent in the file: rows of q_proj and k_proj change places."""
    norm_shift: float = 0.0
    """Added to the weights of norms."""
    window_period: int = 0
    """Of so many layers the last attends to all tokens, the others to the window; 0: all do."""
    long_rope: bool = False
    """Whether it reads long and short factors of rotary embeddings."""
    is_partial: bool = False
    """Whether only a part of each head may be rotated."""


ARCHITECTURES: Mapping[str, GGUFArchitecture] = {
    "llama": GGUFArchitecture("llama", biased=_ALL, is_permuted=True),
    "mistral": GGUFArchitecture("llama", biased=_ALL, is_permuted=True),
    "qwen2": GGUFArchitecture("qwen2", biased=_ALL[:3]),
    "qwen3": GGUFArchitecture("qwen3"),
    "qwen3_moe": GGUFArchitecture("qwen3moe"),
    "gemma2": GGUFArchitecture("gemma2", "gelu_pytorch_tanh", norm_shift=1.0, window_period=2),
    "gemma3_text": GGUFArchitecture("gemma3", "gelu_pytorch_tanh", norm_shift=1.0, window_period=6),
    "phi3": GGUFArchitecture("phi3", long_rope=True, is_partial=True),
}
_LARGEST = {"gemma2": 46, "gemma3": 62}  # layers of the 27B, which scale queries another way


def architecture_of(config: PretrainedConfig, where: str) -> GGUFArchitecture:
    """The row of a model. Raises ``ModelError``: there is none, or the model differs from it."""
    row = ARCHITECTURES.get(config.model_type)
    if row is None:
        raise ModelError(
            f"{where}: model_type {config.model_type} cannot be written as GGUF; those that can: "
            f"{', '.join(ARCHITECTURES)}"
        )
    if differences := _differences(config, row):
        raise ModelError(
            f"{where}: cannot be written as GGUF, since llama.cpp's {row.name} differs: "
            f"{'; '.join(differences)}"
        )
    return row


def head_dim(config: PretrainedConfig) -> int:
    """The width of an attention head."""
    own = getattr(config, "head_dim", None)
    return int(own or config.hidden_size // config.num_attention_heads)


def _differences(config: PretrainedConfig, row: GGUFArchitecture) -> list[str]:
    """What the model has that llama.cpp's graph has not."""
    act = getattr(config, "hidden_activation", None) or getattr(
        config, "hidden_act", row.activation
    )
    found = []
    if act != row.activation:
        found.append(f"activation {row.activation}, not {act}")
    if row.name == "qwen3moe" and not config.norm_topk_prob:
        found.append("the weights of the chosen experts are normalized (norm_topk_prob: true)")
    if getattr(config, "use_bidirectional_attention", False):
        found.append("attention is causal (use_bidirectional_attention: false)")
    if row.name == "gemma3" and getattr(config, "attn_logit_softcapping", None):
        found.append("attn_logit_softcapping is not applied")
    if row.name in _LARGEST and (wanted := _query_scalar(config, row)) is not None:
        found.append(f"query_pre_attn_scalar is {wanted}, not {config.query_pre_attn_scalar}")
    if reason := _layers(config, row):
        found.append(reason)
    return found


def _query_scalar(config: PretrainedConfig, row: GGUFArchitecture) -> int | None:
    """The one that llama.cpp takes for granted, if it is not the model's."""
    is_largest = config.num_hidden_layers == _LARGEST[row.name]
    whole = config.hidden_size // config.num_attention_heads
    wanted = whole if is_largest else head_dim(config)
    return None if config.query_pre_attn_scalar == wanted else wanted


def _layers(config: PretrainedConfig, row: GGUFArchitecture) -> str:
    """How the layers with a window differ from those of the row."""
    kinds = getattr(config, "layer_types", None)
    if not row.window_period or kinds is None:
        return ""
    period = row.window_period
    wanted = ["full" if i % period == period - 1 else "sliding" for i in range(len(kinds))]
    if [kind.removesuffix("_attention") for kind in kinds] == wanted:
        return ""
    return f"every {period}th layer attends to all tokens, the others to a window (layer_types)"


def window_note(config: PretrainedConfig, row: GGUFArchitecture) -> str:
    """What a user must know of a window that llama.cpp ignores; empty if there is none."""
    window = getattr(config, "sliding_window", None)
    if row.window_period or row.name == "phi3" or not window:
        return ""
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
    if "sliding_attention" not in kinds or window >= config.max_position_embeddings:
        return ""
    return f"llama.cpp's {row.name} has no sliding window: beyond {window:,} tokens answers differ"
