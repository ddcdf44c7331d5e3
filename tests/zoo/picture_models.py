"""Tiny random models of every type that reads pictures in transformers, with their processors.

Nothing is downloaded: sizes of the default configuration become those of ``TINY`` wherever they
have these names, and the image processor is made from its class. ``MORE`` has a line for each type
that needs more: settings of its configuration, of its image processor, and of its processor.
"""

import importlib
import json
import re
from collections import Counter
from pathlib import Path

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, AutoTokenizer
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES
from transformers.utils import logging

import folders
from surefoot.data.media.processor import open_processor
from surefoot.errors import ModelError

KINDS = list(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
SIDE, PATCH = 56, 14  # pixels of a picture and of a patch: 16 patches, 4 tokens where 4 join
TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 2048,
    "image_size": SIDE,
    "patch_size": PATCH,
    "depth": 2,
    "embed_dim": 32,
    "num_heads": 4,
    "num_layers": 2,
    "out_hidden_size": 32,
    "projection_dim": 32,
    "d_model": 32,
    "mlp_dim": 48,
    "query_pre_attn_scalar": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "moe_intermediate_size": 24,
    "n_group": 1,
    "topk_group": 1,
}
# lists and tables that follow from sizes
EVERY_LAYER = ("layer_types", "mlp_layer_types", "layers_block_type", "per_layer_config")
NAMED = {  # attributes of tokenizers that processors read
    "image_token": "<image>",
    "video_token": "<video>",
    "audio_token": "<audio>",
    "boi_token": "<boi>",
    "eoi_token": "<eoi>",
    "boa_token": "<boa>",
    "eoa_token": "<eoa>",
    "image_start_token": "<image_start>",
    "image_end_token": "<image_end>",
    "video_start_token": "<video_start>",
    "video_end_token": "<video_end>",
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<image>",
    "image_break_token": "<break>",
    "vision_start_token": "<vision_start>",
    "vision_end_token": "<vision_end>",
}
TEMPLATE = (
    "{%% for message in messages %%}<|im_start|>{{ message['role'] }}\n"
    "{%% if message['content'] is string %%}{{ message['content'] }}"
    "{%% else %%}{%% for part in message['content'] %%}{%% if part['type'] == 'image' %%}%s"
    "{%% elif 'text' in part %%}{{ part['text'] }}{%% endif %%}{%% endfor %%}{%% endif %%}"
    "<|im_end|>{%% endfor %%}{%% if add_generation_prompt %%}<|im_start|>assistant\n{%% endif %%}"
)
QWEN_SIZE = {"shortest_edge": 784, "longest_edge": 3136}  # pixels, not edges
SQUARE = {"height": SIDE, "width": SIDE}
IMAGE_SETTINGS = {  # of image processors, by class
    "Qwen2VLImageProcessorPil": {"size": QWEN_SIZE},
    "CLIPImageProcessorPil": {"size": {"shortest_edge": SIDE}, "crop_size": SQUARE},
    "SiglipImageProcessorPil": {"size": SQUARE},
    "GotOcr2ImageProcessorPil": {"size": SQUARE},
    "PixtralImageProcessorPil": {"size": {"longest_edge": SIDE}, "patch_size": PATCH},
    "Gemma3ImageProcessorPil": {"size": SQUARE},
    "BlipImageProcessorPil": {"size": SQUARE},
    "LlavaImageProcessorPil": {"size": {"shortest_edge": SIDE}, "crop_size": SQUARE},
    "LlavaNextImageProcessorPil": {
        "size": {"shortest_edge": SIDE},
        "crop_size": SQUARE,
        "image_grid_pinpoints": [[SIDE, 2 * SIDE], [2 * SIDE, SIDE]],
    },
    "LlavaOnevisionImageProcessorPil": {
        "size": SQUARE,
        "image_grid_pinpoints": [[SIDE, 2 * SIDE], [2 * SIDE, SIDE]],
    },
    "Idefics3ImageProcessorPil": {
        "size": {"longest_edge": 2 * SIDE},
        "max_image_size": {"longest_edge": SIDE},
    },
    "SmolVLMImageProcessorPil": {
        "size": {"longest_edge": 2 * SIDE},
        "max_image_size": {"longest_edge": SIDE},
    },
}
GEMMA4_TOWER = {
    **{name: TINY[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")},
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "patch_size": PATCH},
    **{"model_type": "gemma4_vision", "pooling_kernel_size": 2, "position_embedding_size": 256},
}
GEMMA3 = {"config": {"mm_tokens_per_image": 4}, "processor": {"image_seq_length": 4}}
IDEFICS = {"config": {"scale_factor": 2}, "processor": {"image_seq_len": 4}}
PINPOINTS = {"image_grid_pinpoints": [[SIDE, 2 * SIDE], [2 * SIDE, SIDE]]}
LLAVA = {
    "patch_size": PATCH,
    "vision_feature_select_strategy": "default",
    "num_additional_image_tokens": 1,
}
LLAVA_NEXT = {"config": PINPOINTS, "processor": LLAVA}
QWEN3_5 = {  # recurrent layers
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
MROPE = {"config": {"text_config": {"rope_parameters": ROPE}}}
OMNI = {**MROPE["config"], "audio_config": {"encoder_attention_heads": 4}}
HALF = {"config": {"text_config": {"rope_parameters": {**ROPE, "mrope_section": [1, 1, 0]}}}}
PATCH_16 = {"image": {"patch_size": PATCH, "size": QWEN_SIZE}}
MORE = {
    "aria": {"config": {"text_config": {"moe_num_experts": 4, "moe_topk": 2}}},
    "aya_vision": {
        "config": {"downsample_factor": 2},
        "processor": {"patch_size": PATCH, "img_size": SIDE, "downsample_factor": 2},
    },
    "chameleon": {"processor": {"image_seq_length": 16}},
    "cohere_compass": MROPE,
    "cosmos3_edge": PATCH_16 | MROPE,
    "cosmos3_omni": {"class": "Qwen3VLProcessor", **MROPE},
    "deepseek_vl": {"image": {"size": SQUARE}, "processor": {"num_image_tokens": 16}},
    "deepseek_vl_hybrid": {"image": {"size": SQUARE}, "processor": {"num_image_tokens": 16}},
    "ernie4_5_vl_moe": {"image": {"size": QWEN_SIZE}},
    "gemma3": GEMMA3,
    "gemma3n": {
        "config": {
            "text_config": {
                "intermediate_size": [48, 48],
                "num_kv_shared_layers": 0,
                "activation_sparsity_pattern": None,
            },
            "audio_config": None,
        }
    },
    "gemma4": {
        "config": {"audio_config": None, "vision_config": GEMMA4_TOWER},
        "image": {"patch_size": PATCH, "pooling_kernel_size": 2, "max_soft_tokens": 70},
    },
    "glm46v": {"image": {"size": QWEN_SIZE}, **MROPE},
    "glm4v": {"image": {"size": QWEN_SIZE}, **MROPE},
    "glm4v_moe": {"of": "glm4v", "image": {"size": QWEN_SIZE}, **HALF},
    "glm5_next": {"config": {"text_config": {"num_key_value_heads": 4}}},
    "glm_ocr": {"of": "glm46v", "class": "Glm46VProcessor", "image": {"size": QWEN_SIZE}, **MROPE},
    "glmga": {"of": "glm46v", "class": "Glm46VProcessor", "image": {"size": QWEN_SIZE}, **MROPE},
    "granite4_vision": LLAVA_NEXT,
    "hunyuan_vl": {
        **PATCH_16,
        "picture": "<image_start>%s<image_end>",
        "config": {"text_config": {"head_dim": 8, "rope_parameters": ROPE}},
    },
    "idefics3": IDEFICS,
    "smolvlm": IDEFICS,
    "internvl": {"processor": {"image_seq_length": 4}},
    "mllama": {"bos": "<|endoftext|>"},
    "lighton_ocr": {"config": {"spatial_merge_size": 2}, "processor": {"patch_size": PATCH}},
    "llava": {"processor": LLAVA},
    "llava_next": LLAVA_NEXT,
    "llava_next_video": LLAVA_NEXT,
    "llava_onevision": {"config": PINPOINTS, "processor": {"num_image_tokens": 16}},
    "mistral3": {"config": {"spatial_merge_size": 2}, "processor": {"patch_size": PATCH}},
    "ovis2": {"image": {"size": SQUARE}, "processor": {"image_seq_length": 22}},
    "paddleocr_vl": {"image": {"size": QWEN_SIZE}, **MROPE},
    "paligemma": {"image": {"image_seq_length": 16}, "bos": "<|endoftext|>"},
    "qianfan_ocr": {"processor": {"image_seq_length": 4}},
    "qwen2_5_omni_thinker": {"of": "qwen2_5_omni", "class": "Qwen2_5OmniProcessor", "config": OMNI},
    "qwen2_5_vl": MROPE,
    "qwen2_vl": MROPE,
    "qwen3_5": {"has_own_tokenizer": True, "config": {"text_config": QWEN3_5}},
    "qwen3_5_moe": {"has_own_tokenizer": True, "config": {"text_config": QWEN3_5}},
    "qwen4_exp": {"has_own_tokenizer": True, "config": {"text_config": QWEN3_5}},
    "qwen3_omni_moe_thinker": {
        "of": "qwen3_omni_moe",
        "class": "Qwen3OmniMoeProcessor",
        "config": OMNI,
    },
    "qwen3_vl_moe": {"of": "qwen3_vl"},
    "vipllava": {
        "of": "vipllava",
        "config": {"vision_feature_layers": [-2, -1]},
        "processor": LLAVA,
    },
}


def shrunk(values, tokens):
    """A configuration as plain data with the sizes of ``TINY`` and the vocabulary of ``tokens``."""
    made = {}
    for name, value in values.items():
        if name in EVERY_LAYER or name in ("id2label", "label2id"):
            continue
        if not isinstance(name, str):
            made[name] = value
        elif isinstance(value, dict) and name != "rope_parameters":
            made[name] = shrunk(value, tokens)
        elif name.startswith("vocab_size") and isinstance(value, int):
            made[name] = len(tokens)
        elif name in TINY and isinstance(value, int) and not isinstance(value, bool):
            made[name] = TINY[name]
        elif name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            made[name] = tokens.eos_token_id
        elif "dropout" in name and isinstance(value, float):
            made[name] = 0.0
        else:
            made[name] = value
    return made


def merged(values, more):
    """``values`` with ``more``, also inside of nested settings."""
    made = {**values}
    for name, value in more.items():
        is_inner = isinstance(value, dict) and isinstance(made.get(name), dict)
        made[name] = merged(made[name], value) if is_inner else value
    return made


def processor_class(kind):
    """The class of the processor of a type; None if transformers has none."""
    more = MORE.get(kind, {}).get("class")
    name = more or PROCESSOR_MAPPING_NAMES.get(kind)
    return None if name is None else getattr(transformers, name)


def image_processor(kind):
    """The image processor of a type, without torchvision if transformers has one."""
    more = MORE.get(kind, {})
    names = IMAGE_PROCESSOR_MAPPING_NAMES.get(more.get("of", kind), {})
    name = names.get("pil") or names.get("torchvision")
    if name is None:
        raise LookupError("transformers has no image processor for it")
    settings = {**IMAGE_SETTINGS.get(name, {}), **more.get("image", {})}
    return getattr(transformers, name)(**settings)


def tokenizer_for(kind):
    """Bytes, the tokens of ChatML, and those that the processor names in its code."""
    source = Path(importlib.import_module(processor_class(kind).__module__).__file__).read_text()
    words = re.findall(r'"(<[^"\s<>]+>|\|[A-Z]+\||<\|[^"\s|]+\|>)"', source)
    rows = [f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)]
    attributes = re.findall(r"tokenizer\.(\w+_token)\b", source)
    named = {n: f"<{n}>" for n in attributes if n not in ("bos_token", "eos_token", "pad_token")}
    named |= NAMED
    extra = dict.fromkeys([*named.values(), *words, *rows, "TILE", "TILE_GLOBAL"])
    made = folders.tokenizer("", tuple(extra))
    made._set_model_specific_special_tokens(named)
    if (bos := MORE.get(kind, {}).get("bos")) is not None:
        made.bos_token = bos
    return made


def token_ids(config, media, tokens):
    """The ids of ``config`` that name tokens, as the processor has them."""
    processor, made, free = media.processor, {}, iter(range(40, 200))
    for name, value in config.items():
        if not re.search("token_(id|index)$", name) or not isinstance(value, int):
            continue
        if name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            continue
        plain = name.replace("_index", "_id")
        found = getattr(processor, plain, None)
        if plain == "image_token_id":
            ids = tokens(media.texts_of([(64, 64)])[0], add_special_tokens=False)["input_ids"]
            found = Counter(i for i in ids if i in tokens.added_tokens_decoder).most_common(1)[0][0]
        made[name] = found if isinstance(found, int) else next(free)
    return made


def save(folder, kind):
    """A random model of ``kind`` with its tokenizer and processor in ``folder``. Raises
    ``ModelError``: Surefoot does not read its pictures; ``UnbuiltError``: there is none."""
    logging.set_verbosity_error()
    more = MORE.get(kind, {})
    try:
        found = processor_class(kind)
        if found is None:
            raise LookupError("transformers has no processor for it")
        tokens, settings = tokenizer_for(kind), {"processor_class": found.__name__}
        image_processor(kind).save_pretrained(folder)
        tokens.save_pretrained(folder)
        values = merged(shrunk(CONFIG_MAPPING[kind]().to_dict(), tokens), more.get("config", {}))
    except Exception as error:
        raise UnbuiltError(f"{type(error).__name__}: {error}") from error
    settings |= more.get("processor", {})
    (folder / "processor_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    media = open_processor(folder, tokens)
    if media is None:
        raise ModelError("its processor is none of pictures")
    tokens.chat_template = TEMPLATE % (more.get("picture", "%s") % media.processor.image_token)
    tokens.save_pretrained(folder)
    if more.get("has_own_tokenizer"):  # of a class that transformers chooses by the type
        AutoTokenizer.from_pretrained(folder).save_pretrained(folder)
    try:
        values |= token_ids(values, media, tokens)
        torch.manual_seed(0)
        config = CONFIG_MAPPING[kind].from_dict(values)
        model = AutoModelForImageTextToText.from_config(config).float().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
        model.save_pretrained(folder)
    except Exception as error:
        raise UnbuiltError(f"{type(error).__name__}: {error}") from error
    return media.processor


class UnbuiltError(Exception):
    """No tiny model of a type was made."""
