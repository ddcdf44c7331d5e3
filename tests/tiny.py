"""Tiny random models of real architectures, the same for every test that needs one."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

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
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "mistral": {"sliding_window": 4},
    "gemma2": {"sliding_window": 4},
}
MORE = {  # for the tests that look for them
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "olmo2": {},
    "phi3": {},
    "starcoder2": {},  # its norms compute in the type of the weights, not in float32
}
WITH_SINKS = {"gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2}}


def model(kind="llama", *, attention=None, dtype=torch.float32, **changes):
    """A random model of ``kind``; the same seed gives the same weights."""
    torch.manual_seed(0)
    settings = {"model_type": kind, **SIZES, **(KINDS | MORE | WITH_SINKS)[kind], **changes}
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    attention = attention or ("eager" if kind in ("gemma2", "gpt_oss") else "sdpa")
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).to(dtype).eval()
