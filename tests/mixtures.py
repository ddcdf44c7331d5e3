"""The tiny models of ``zoo`` with experts, routers or state-space layers, for what adapts them."""

from zoo import architectures

KINDS = (
    *("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3", "glm4_moe"),
    *("dots1", "ernie4_5_moe", "hunyuan_v1_moe", "solar_open", "qwen3_next", "minimax"),
    *("minimax_m2", "afmoe", "longcat_flash", "gpt_oss", "granitemoe", "granitemoeshared"),
    *("granitemoehybrid", "jetmoe", "phimoe", "llama4_text", "lfm2_moe", "jamba", "doge"),
    *("bamba", "mamba", "mamba2", "falcon_mamba", "falcon_h1", "nemotron_h"),
)
_CHANGES = {
    "deepseek_v3": {"num_hidden_layers": 2},  # one dense, one of experts
    "doge": {"is_moe": True, "num_experts": 4, "num_experts_per_tok": 2},
}


def model(kind, **changes):
    """A random model of ``kind`` in evaluation mode, no weight of which is 0 or 1."""
    return architectures.build(kind, attention="eager", **{**_CHANGES.get(kind, {}), **changes})
