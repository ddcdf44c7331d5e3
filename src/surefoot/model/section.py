"""The recipe's ``model`` section."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator

from ..errors import RecipeError
from ..schema import FREE, ROUNDS, Needs
from ..schema.locations import ModelPath

Recomputation = Literal["none", "selective", "full", "offload"]


def recomputation(value: object) -> object:
    """The policy that a boolean stands for."""
    return {True: "full", False: "none"}[value] if isinstance(value, bool) else value


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    """Which pretrained model to start from, and its form in memory."""

    path: str
    """A folder with a Hugging Face model or of a run, or a hub id such as ``Qwen/Qwen3-0.6B``."""
    new_weights: bool = False
    """Train from random weights, not from pretrained ones: ``path`` is then a folder (or hub id)
    with a configuration and a tokenizer, or its ``config.json``. transformers initializes them with
    ``train.seed``, and a run writes them into ``train.output_dir`` once, in float32."""
    reading: Annotated[Mapping[str, ModelPath], FREE] = field(default_factory=dict, hash=False)
    """How the weights of ``path``, or of ``checkpoint.resume``, are read if they are another
    program's: its options of ``surefoot ckpt convert``, such as ``source_parallel_config``."""
    revision: str | None = None
    """Branch, tag or commit of a hub model."""
    hub: Literal["huggingface", "modelscope"] = "huggingface"
    """Where a hub id is looked up."""
    adapter: Path | None = None
    """A PEFT adapter to continue training from (with ``method: lora``)."""
    frozen_adapters: tuple[Path, ...] = ()
    """PEFT adapters on the base that are not trained (with ``method: lora``). The one that is
    trained starts from their sum; checkpoints contain all of them, as one adapter of the base."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the weights. ``auto``: trainable weights in float32, frozen ones as stored
    (float32 on a CPU)."""
    attention: Annotated[Literal["auto", "sdpa", "eager", "flash_attention_2"], ROUNDS] = "auto"
    """Attention kernel. ``auto`` takes sdpa where the architecture has it, otherwise eager. Packed
    rows on a GPU use the first of varlen, flex and sdpa that passes a self-check, which a resume
    keeps."""
    max_positions: int | None = None
    """Positions of the model (default: its own, ``max_position_embeddings``). More of them rescale
    its rotary embeddings; checkpoints contain them in ``config.json``."""
    rope_scaling: Annotated[Literal["yarn", "linear", "llama3"], Needs("max_positions")] = "yarn"
    """How ``max_positions`` rescales rotary embeddings: YaRN (arXiv:2309.00071), all frequencies
    alike (arXiv:2306.15595), or low ones alone as in Llama 3.1."""
    new_special_tokens: tuple[str, ...] = ()
    """Tokens to add to the vocabulary. They take rows of the embeddings' padding, then new rows,
    which are all initialized to the mean of the old ones."""
    eos_token: Annotated[str | None, FREE] = None
    """The end-of-sequence token of the tokenizer that is saved with the weights. Unset: the model's
    own. What is trained and where responses end does not depend on it, but programs that ask the
    tokenizer stop there."""
    gradient_checkpointing: Annotated[
        Literal[Recomputation, "auto"], BeforeValidator(recomputation), ROUNDS
    ] = "none"
    """What to keep of each layer for the backward pass. ``none`` keeps all activations.
    ``selective`` keeps the results of matrix products and attention, and recomputes the rest.
    ``full`` keeps the layer's input and recomputes the layer: about a fifth slower. ``offload`` is
    ``full`` with the inputs in main memory (on a CPU, the same as ``full``). ``true`` is ``full``,
    ``false`` is ``none``. ``auto`` takes the first of them that fits the free memory, as estimated
    when the run begins; a resume keeps it.
    """
    neftune_noise_alpha: float | None = None
    """Noise on the embeddings of tokens in training (NEFTune, arXiv:2310.05914), such as 5."""
    router_aux_loss_coef: float | None = None
    """Weight of the loss that balances the experts of a mixture. Unset: as ``config.json`` says.
    Otherwise saved ones say it, too (``output_router_logits``)."""
    router_bias_update_rate: float | None = None
    """Update the bias that chooses the experts of a token without a loss after each step, by this
    much, so that all get as many tokens (``e_score_correction_bias`` of DeepSeek-V3,
    arXiv:2412.19437, which took 0.001). With ``method: full`` or ``freeze``, which save it."""
    compile: Annotated[bool, ROUNDS] = False
    """Compile the layers with ``torch.compile``: faster steps after a warm-up of about a minute.
    Needs a C++ compiler."""
    float8: Literal["rowwise"] | None = None
    """Compute products of trained linear layers in 8-bit floating point, with a scale for each row.
    Needs a GPU of compute capability 8.9 (a CPU emulates it) and
    ``pip install -e '.[float8]'`` in the clone of Surefoot.
    """
    quantization_bit: Literal[4, 8] | None = None
    """Store the frozen base in 4 or 8 bits (QLoRA, with ``method: lora``). Needs
    ``pip install -e '.[qlora]'`` in the clone of Surefoot."""
    quantization_type: Annotated[Literal["nf4", "fp4"], Needs("quantization_bit", (4,))] = "nf4"
    """The sixteen values of 4 bits: spaced like a normal distribution (nf4), or floating point
    (fp4)."""
    double_quantization: Annotated[bool, Needs("quantization_bit", (4,))] = True
    """Quantize the scales of 4 bits, too: 0.4 bits less for each weight."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Off unless you trust its author."""

    @property
    def recomputes(self) -> Recomputation:
        """The policy of ``gradient_checkpointing``. Raises ``RecipeError`` while it is auto."""
        if self.gradient_checkpointing == "auto":
            raise RecipeError(
                "model.gradient_checkpointing: auto is chosen by `surefoot train` alone; set none, "
                "selective, full or offload, which `surefoot plan` helps to choose"
            )
        return self.gradient_checkpointing

    def __post_init__(self) -> None:
        policy = recomputation(self.gradient_checkpointing)
        object.__setattr__(self, "gradient_checkpointing", policy)
        if policy == "selective" and self.compile:
            raise ValueError(
                "gradient_checkpointing: selective cannot look into layers that compile has fused; "
                "set it to full, or compile to false"
            )
        if self.new_weights and (self.adapter is not None or self.frozen_adapters):
            raise ValueError(
                "new_weights and an adapter do not go together: an adapter was trained on other "
                "weights; leave one of them out"
            )
        for name in ("neftune_noise_alpha", "router_aux_loss_coef", "router_bias_update_rate"):
            if (value := getattr(self, name)) is not None and value <= 0:
                raise ValueError(f"{name} must be positive, got {value}")
