"""Tiny random models that read pictures, with their real processors, built without a download."""

import torch
from transformers import AutoConfig, AutoModelForImageTextToText

import tiny

TEXT = {**tiny.SIZES, "num_hidden_layers": 2, "vocab_size": 512, "max_position_embeddings": 1024}
TEXT |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 56,
    "patch_size": 14,
}
IMAGE = {name: 500 + number for number, name in enumerate(("image", "video", "start", "end"))}
CONFIGS = {
    "qwen2_vl": {
        "text_config": {
            **TEXT,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [1, 1, 2],
            },
        },
        "vision_config": {
            "depth": 2,
            "embed_dim": 32,
            "hidden_size": 32,
            "num_heads": 4,
            "mlp_ratio": 2,
        },
        "image_token_id": IMAGE["image"],
        "video_token_id": IMAGE["video"],
        "vision_start_token_id": IMAGE["start"],
        "vision_end_token_id": IMAGE["end"],
    },
    "llava": {
        "text_config": {"model_type": "llama", **TEXT},
        "vision_config": {"model_type": "clip_vision_model", "projection_dim": 32, **TOWER},
        "image_token_index": IMAGE["image"],
    },
    "idefics3": {
        "text_config": {"model_type": "llama", **TEXT},
        "vision_config": TOWER,
        "scale_factor": 2,
        "image_token_id": IMAGE["image"],
    },
    "gemma3": {
        "text_config": {**TEXT, "sliding_window": 32, "query_pre_attn_scalar": 8},
        "vision_config": TOWER,
        "mm_tokens_per_image": 4,
        "image_token_index": IMAGE["image"],
    },
}


def model(kind):
    """A random model of ``kind``; the same weights every time."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **CONFIGS[kind])
    return AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa").eval()
