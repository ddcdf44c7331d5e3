"""Tiny random models with experts, routers or state-space layers, for what adapts them."""

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
_MAMBA = {"state_size": 8, "conv_kernel": 4, "expand": 2}
_MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8}
KINDS = {
    "mixtral": _LOCAL,
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 24},
    "qwen3_moe": _EXPERTS,
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v2": {**_ROUTED, **_LATENT},
    "deepseek_v3": {**_ROUTED, **_LATENT},
    "glm4_moe": {**_ROUTED, "head_dim": 8},
    "dots1": _ROUTED,
    "ernie4_5_moe": {
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 24,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
    },
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2, "num_shared_expert": 1, "head_dim": 8},
    "solar_open": {**_ROUTED, "head_dim": 8},
    "qwen3_next": {
        **_EXPERTS,
        "shared_expert_intermediate_size": 24,
        "head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "minimax": {**_LOCAL, "head_dim": 8, "layer_types": ["linear_attention", "full_attention"]},
    "minimax_m2": {**_LOCAL, "head_dim": 8, "rotary_dim": 8},
    "afmoe": {**_EXPERTS, "num_dense_layers": 1, "num_shared_experts": 1, "head_dim": 8},
    "longcat_flash": {
        **_LATENT,
        "num_layers": 2,
        "ffn_hidden_size": 48,
        "expert_ffn_hidden_size": 24,
        "moe_topk": 2,
        "n_routed_experts": 4,
        "zero_expert_num": 2,
        "head_dim": 8,
    },
    "gpt_oss": {**_LOCAL, "head_dim": 8},
    "granitemoe": _LOCAL,
    "granitemoeshared": {**_LOCAL, "shared_intermediate_size": 24},
    "granitemoehybrid": {
        **_LOCAL,
        **_MAMBA2,
        "shared_intermediate_size": 24,
        "layer_types": ["mamba", "attention"],
    },
    "jetmoe": {**_LOCAL, "kv_channels": 8, "num_key_value_heads": 2},
    "phimoe": _LOCAL,
    "llama4_text": {
        **_LOCAL,
        "num_experts_per_tok": 1,
        "head_dim": 8,
        "intermediate_size_mlp": 48,
        "interleave_moe_layer_step": 2,
    },
    "lfm2_moe": {
        **_EXPERTS,
        "num_dense_layers": 1,
        "layer_types": ["conv", "full_attention"],
    },
    "jamba": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_state": 8,
    },
    "doge": {"is_moe": True, "num_experts": 4, "num_experts_per_tok": 2},
    "bamba": {**_MAMBA2, "attn_layer_indices": [1]},
    "mamba": _MAMBA,
    "mamba2": {**_MAMBA, "num_heads": 4, "head_dim": 16, "n_groups": 1},
    "falcon_mamba": _MAMBA,
    "falcon_h1": {**_MAMBA2, "mamba_d_ssm": 64, "head_dim": 8},
    "nemotron_h": {
        "hybrid_override_pattern": "M*",
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 1,
        "head_dim": 8,
    },
}


def model(kind, **changes):
    """A random model of ``kind`` in evaluation mode, no weight of which is 0 or 1."""
    sizes = {**SIZES, **KINDS[kind], **changes}
    config = CONFIG_MAPPING[kind](**sizes)
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return made
