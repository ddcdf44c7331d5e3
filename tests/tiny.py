"""Tiny random models of real architectures, the same for every test that needs one."""

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
KINDS = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": 4}),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM, {"sliding_window": 4}),
}
MORE = {  # for the tests that look for them
    "mixtral": (
        MixtralConfig,
        MixtralForCausalLM,
        {"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "qwen3_moe": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    ),
    "olmo2": (Olmo2Config, Olmo2ForCausalLM, {}),
    "phi3": (Phi3Config, Phi3ForCausalLM, {}),
}


def model(kind="llama", *, attention=None, dtype=torch.float32, **changes):
    """A random model of ``kind``; the same seed gives the same weights."""
    config_class, model_class, extra = (KINDS | MORE)[kind]
    torch.manual_seed(0)
    config = config_class(**{**SIZES, **extra, **changes})
    config._attn_implementation = attention or ("eager" if kind == "gemma2" else "sdpa")
    return model_class(config).to(dtype).eval()
