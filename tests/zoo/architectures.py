"""Tiny random models of every architecture that transformers opens as a causal language model.

``SETTINGS`` has a line for each: what its configuration needs beside the sizes of ``PLAIN``. A
suffix after a colon is a variant of the architecture before it.
"""

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.utils import logging

PLAIN = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
NO_DROPOUT = dict.fromkeys(
    (
        *("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"),
        *("dropout", "attention_probs_dropout_prob", "hidden_dropout_prob", "activation_dropout"),
        *("resid_dropout", "embed_dropout", "embedding_dropout", "residual_dropout", "layerdrop"),
    ),
    0.0,
)
WINDOW = 8
MANY_HEADS = {"num_key_value_heads": 4}
NO_NOISE = {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0}  # of routers, in training
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
DEEPSEEK = {
    **EXPERTS,
    **MANY_HEADS,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_hidden_layers": 3,
}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "head_dim": 4,
}
MAMBA = {"state_size": 8, "conv_kernel": 4, "expand": 2, "time_step_rank": 4}
MAMBA2 = {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 8}
HYBRID = {
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
    "num_hidden_layers": 3,
}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
SLIDING = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
}
SETTINGS = {
    "afmoe": {**EXPERTS, **SLIDING, "num_dense_layers": 1, "num_shared_experts": 1},
    "apertus": {},
    "arcee": {},
    "bamba": {**HYBRID, "attn_layer_indices": [1]},
    "biogpt": {},
    "bitnet": {},
    "bloom": {"n_head": 4},
    "codegen": {"rotary_dim": 4, "n_inner": 48},
    "cohere": {},
    "cohere2": SLIDING,
    "ctrl": {"dff": 48},
    "cwm": SLIDING,
    "deepseek_v2": {**DEEPSEEK, **LATENT},
    "deepseek_v3": {**DEEPSEEK, **LATENT},
    "diffllama": {},
    "doge": {"keep_window_size": 128},
    "doge:window": {"keep_window_size": 128, "sliding_window": WINDOW},
    "dots1": DEEPSEEK,
    "ernie4_5": {},
    "ernie4_5_moe": {
        **EXPERTS,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
    },
    "exaone4": SLIDING,
    "falcon": {
        "new_decoder_architecture": False,
        "multi_query": True,
        "alibi": False,
        "head_dim": None,
    },
    "falcon:alibi": {
        "new_decoder_architecture": False,
        "multi_query": True,
        "alibi": True,
        "head_dim": None,
    },
    "falcon_h1": {**HYBRID, "mamba_d_ssm": 64, "mlp_expansion_factor": 2},
    "falcon_mamba": MAMBA,
    "flex_olmo": EXPERTS,
    "gemma": {},
    "gemma2": SLIDING,
    "gemma3_text": SLIDING,
    "gemma3n_text": {
        **SLIDING,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 64,
        "num_kv_shared_layers": 1,
        "laurel_rank": 4,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        "intermediate_size": [48] * 4,
    },
    "glm": {},
    "glm4": {},
    "glm4_moe": DEEPSEEK,
    "gpt2": {},
    "gpt_bigcode": {},
    "gpt_neo": {
        "attention_types": [[["global", "local"], 1]],
        "num_layers": 2,
        "num_heads": 4,
        "window_size": WINDOW,
    },
    "gpt_neox": MANY_HEADS,
    "gpt_oss": {**EXPERTS, **SLIDING},
    "gptj": {"rotary_dim": 4},
    "granite": {},
    "granitemoe": EXPERTS,
    "granitemoehybrid": {
        **HYBRID,
        **EXPERTS,
        "shared_intermediate_size": 24,
        "layer_types": ["mamba", "attention", "mamba"],
    },
    "granitemoeshared": {**EXPERTS, "shared_intermediate_size": 24},
    "helium": {},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": {**EXPERTS, "moe_topk": 2},
    "hyperclovax": {},
    "jais2": {},
    "jamba": {
        **EXPERTS,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "num_hidden_layers": 4,
        "attn_layer_period": 4,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "use_mamba_kernels": False,
    },
    "jetmoe": {**EXPERTS, "kv_channels": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {
        **EXPERTS,
        "layer_types": ["conv", "full_attention", "conv"],
        "num_dense_layers": 1,
        "num_hidden_layers": 3,
    },
    "llama": {},
    "llama:bias": {"attention_bias": True, "mlp_bias": True},
    "llama:tied": {"tie_word_embeddings": True},
    "llama4_text": {
        **EXPERTS,
        "intermediate_size_mlp": 48,
        "attention_chunk_size": WINDOW,
        "layer_types": ["chunked_attention", "full_attention"],
        "no_rope_layers": [1, 0],
        "interleave_moe_layer_step": 2,
    },
    "longcat_flash": {
        **EXPERTS,
        **LATENT,
        **MANY_HEADS,
        "num_layers": 2,
        "ffn_hidden_size": 48,
        "expert_ffn_hidden_size": 24,
        "n_routed_experts": 4,
        "zero_expert_num": 1,
        "moe_topk": 2,
    },
    "mamba": MAMBA,
    "mamba2": MAMBA2,
    "mellum": {**EXPERTS, **SLIDING},
    "minicpm3": {**LATENT, **MANY_HEADS},
    "minimax": {**EXPERTS, "layer_types": ["linear_attention", "full_attention"], "block_size": 8},
    "minimax_m2": {**EXPERTS, "rotary_dim": 4},
    "ministral": SLIDING,
    "mistral": {"sliding_window": WINDOW},
    "mixtral": EXPERTS,
    "mixtral:window": {**EXPERTS, "sliding_window": WINDOW},
    "modernbert-decoder": {
        "local_attention": 2 * WINDOW,
        "global_attn_every_n_layers": 2,
        "layer_types": ["full_attention", "sliding_attention"],
        "cls_token_id": 1,
        "sep_token_id": 2,
    },
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "expansion_ratio": 2, "max_seq_len": 128},
    "nanochat": {},
    "nemotron": {},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "moe"],
        "hybrid_override_pattern": "M*E",
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 1,
        "chunk_size": 8,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 24,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 3,
        "topk_group": 1,
        "n_group": 1,
    },
    "olmo": {},
    "olmo2": {},
    "olmo3": SLIDING,
    "olmoe": EXPERTS,
    "openai-gpt": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "persimmon": MANY_HEADS,
    "phi": {},
    "phi3": {"sliding_window": WINDOW},
    "phimoe": {**EXPERTS, **NO_NOISE},
    "phimoe:window": {**EXPERTS, **NO_NOISE, "sliding_window": WINDOW},
    "qwen2": {},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 24},
    "qwen2_moe:window": {
        **EXPERTS,
        **SLIDING,
        "shared_expert_intermediate_size": 24,
        "use_sliding_window": True,
    },
    "qwen3": {},
    "qwen3_5_text": LINEAR,
    "qwen3_moe": EXPERTS,
    "qwen3_next": {**EXPERTS, **LINEAR, "shared_expert_intermediate_size": 24},
    "recurrent_gemma": {
        "block_types": ["recurrent", "attention"],
        "attention_window_size": WINDOW,
        "lru_width": 32,
    },
    "rwkv": {"attention_hidden_size": 32, "context_length": 128},
    "seed_oss": {},
    "smollm3": {},
    "solar_open": DEEPSEEK,
    "stablelm": {},
    "starcoder2": {"sliding_window": WINDOW},
    "vaultgemma": SLIDING,
    "xglm": {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48},
    "zamba2": {
        "num_hidden_layers": 6,
        "layers_block_type": ["mamba", "mamba", "hybrid"] * 2,
        "mamba_d_state": 8,
        "n_mamba_heads": 8,
        "mamba_headdim": 8,
        "chunk_size": 8,
        "adapter_rank": 4,
        "use_shared_attention_adapter": True,
        "num_mem_blocks": 1,
        "head_dim": None,
        **MANY_HEADS,
    },
}


def build(name, attention=None, **changes):
    """A random model with the line ``name``; no weight is 0 or 1 all over, so none is idle."""
    logging.set_verbosity_error()
    kind = name.partition(":")[0]
    settings = {**PLAIN, **NO_DROPOUT, **SETTINGS[name], **changes}
    config = CONFIG_MAPPING[kind](**{k: v for k, v in settings.items() if v is not None})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model
