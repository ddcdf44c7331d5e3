"""Tiny random models that read pictures, with their real processors, built without a download."""

import json
import os
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    CLIPImageProcessorPil,
    Gemma3ImageProcessorPil,
    Idefics3ImageProcessorPil,
    Qwen2VLImageProcessorPil,
)

import folders
import tiny
from surefoot.batch import OutputSpec, Probe
from surefoot.data.rows.formats import OpenAI
from surefoot.data.section import DataSection
from surefoot.data.text.codec import Codec
from surefoot.recipe.recipe import load
from surefoot.run import parts

TEXT = {**tiny.SIZES, "num_hidden_layers": 2, "vocab_size": 320, "max_position_embeddings": 2048}
TEXT |= {"bos_token_id": None, "eos_token_id": 256, "pad_token_id": 256}
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 56,
    "patch_size": 14,
}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
QWEN_TOWER = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 2}
TOKENS = {  # those of the processor first: beyond bytes and ChatML, from 259 on
    "qwen2_vl": ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"),
    "llava": ("<image>",),
    "idefics3": (
        "<image>",
        "<fake_token_around_image>",
        "<global-img>",
        "<end_of_utterance>",
        *(f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)),
    ),
    "gemma3": (
        "<image_soft_token>",
        "<start_of_image>",
        "<end_of_image>",
        "<start_of_turn>",
        "<end_of_turn>",
    ),
}
IMAGE = 259  # the first of these
CONFIGS = {
    "qwen2_vl": {
        "text_config": {**TEXT, "rope_parameters": ROPE},
        "vision_config": QWEN_TOWER,
        "image_token_id": IMAGE,
        "video_token_id": IMAGE + 1,
        "vision_start_token_id": IMAGE + 2,
        "vision_end_token_id": IMAGE + 3,
    },
    "llava": {
        "text_config": {"model_type": "llama", **TEXT},
        "vision_config": {"model_type": "clip_vision_model", "projection_dim": 32, **TOWER},
        "image_token_index": IMAGE,
    },
    "idefics3": {
        "text_config": {"model_type": "llama", **TEXT},
        "vision_config": TOWER,
        "scale_factor": 2,
        "image_token_id": IMAGE,
    },
    "gemma3": {
        "text_config": {**TEXT, "sliding_window": 32, "query_pre_attn_scalar": 8},
        "vision_config": TOWER,
        "mm_tokens_per_image": 4,
        "image_token_index": IMAGE,
    },
}
PROCESSORS = {  # the class, its settings, and the image processor
    "qwen2_vl": (
        "Qwen2VLProcessor",
        {},
        lambda: Qwen2VLImageProcessorPil(size={"shortest_edge": 784, "longest_edge": 3136}),
    ),
    "llava": (
        "LlavaProcessor",
        {
            "patch_size": 14,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
        lambda: CLIPImageProcessorPil(size={"shortest_edge": 56}, crop_size=56),
    ),
    "idefics3": (
        "Idefics3Processor",
        {"image_seq_len": 4},
        lambda: Idefics3ImageProcessorPil(
            size={"longest_edge": 112}, max_image_size={"longest_edge": 56}
        ),
    ),
    "gemma3": (
        "Gemma3Processor",
        {"image_seq_length": 4},
        lambda: Gemma3ImageProcessorPil(size={"height": 56, "width": 56}),
    ),
}
QWEN = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for content in message['content'] %}{% if content['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif 'text' in content %}"
    "{{ content['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAVA = (  # reads parts only, and writes pictures first
    "{% for message in messages %}{{ message['role'].upper() + ': ' }}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}<image>\n"
    "{% endfor %}{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ content['text'] + ' ' }}{% endfor %}{% if message['role'] == 'assistant' %}<|im_end|>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}ASSISTANT: {% endif %}"
)
IDEFICS = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}:{% else %}: {% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}<image>{% endif %}{% endfor %}<end_of_utterance>\n"
    "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
GEMMA = (
    "{% for message in messages %}<start_of_turn>"
    "{{ 'model' if message['role'] == 'assistant' else message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] | trim }}"
    "{% else %}{% for item in message['content'] %}{% if item['type'] == 'image' %}"
    "<start_of_image>{% elif item['type'] == 'text' %}{{ item['text'] | trim }}{% endif %}"
    "{% endfor %}{% endif %}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
TEMPLATES = {"qwen2_vl": QWEN, "llava": LLAVA, "idefics3": IDEFICS, "gemma3": GEMMA}
PROJECTORS = {
    "qwen2_vl": "model.visual.merger.",
    "llava": "model.multi_modal_projector.",
    "idefics3": "model.connector.",
    "gemma3": "model.multi_modal_projector.",
}
TOWERS = {
    "qwen2_vl": "model.visual.",
    "llava": "model.vision_tower.",
    "idefics3": "model.vision_model.",
    "gemma3": "model.vision_tower.",
}
KINDS = list(CONFIGS)


def part_of(kind, name):
    """The part of a parameter, as LLaMA-Factory's table of models (0.9.5) has it."""
    if name.startswith(PROJECTORS[kind]):
        return "projector"
    return "tower" if name.startswith(TOWERS[kind]) else "language"


def model(kind):
    """A random model of ``kind``; the same weights every time."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **CONFIGS[kind])
    made = AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa").eval()
    with torch.no_grad():
        for weight in made.parameters():  # a projection that starts at 0 would hide all pictures
            if weight.ndim > 1 and not weight.any():
                weight.normal_(std=0.02)
    return made


def save_model(folder, kind):
    """A random model with its tokenizer and its processor; returns the folder."""
    model(kind).save_pretrained(folder)
    tokenizer = folders.tokenizer(TEMPLATES[kind], TOKENS[kind])
    if kind == "gemma3":
        names = dict(zip(("image_token", "boi_token", "eoi_token"), TOKENS[kind], strict=False))
        tokenizer._set_model_specific_special_tokens(names)
    tokenizer.save_pretrained(folder)
    name, settings, image_processor = PROCESSORS[kind]
    image_processor().save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": name, **settings}))
    return folder


def picture(path, size=(64, 64), *, seed=0):
    """A picture of noise with a figure in it."""
    noise = np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), np.uint8)
    made = Image.fromarray(noise)
    ImageDraw.Draw(made).rectangle((8, 8, 24, 24), fill=(255, 0, 0))
    made.save(path)
    return path.name


def rows(folder, count=6):
    """Rows in LLaMA-Factory's form, with no, one or two pictures of several sizes in ``folder``."""
    made = []
    for number in range(count):
        sizes = [[], [(64, 64)], [(96, 40), (56, 84)]][number % 3]
        names = [
            picture(folder / f"{number}_{at}.png", size, seed=10 * number + at)
            for at, size in enumerate(sizes)
        ]
        question = "<image> and ".join(["what" * (number % 4 + 1), *["this"] * len(names)])
        turns = [{"role": "user", "content": question}]
        turns += [{"role": "assistant", "content": f"it is number {number}"}]
        made.append({"messages": turns, "images": names})
    return made


DATA = {field.name for field in fields(DataSection)}


def recipe(folder, base, *, media=None, train=None, stage="sft", method="full", **more):
    """A recipe for ``rows.jsonl`` in ``folder``, with pictures beside it."""
    settings = {
        "model": {"path": str(base), **more.pop("model", {})},
        "stage": stage,
        "method": method,
        "data": {
            "datasets": [str(folder / "rows.jsonl")],
            "dataset_dir": str(folder),
            "cutoff_len": 1024,
            "cache_dir": str(folder / "cache"),
            "media": media or {},
            **{key: value for key, value in more.items() if key in DATA},
        },
        "train": {
            "output_dir": str(folder / "run"),
            "max_steps": 4,
            "global_batch_size": 4,
            "micro_batch_size": 2,
            **(train or {}),
        },
        **{key: value for key, value in more.items() if key not in DATA},
    }
    path = folder / f"recipe-{os.getpid()}.yaml"  # ranks write their own
    path.write_text(json.dumps(settings))
    return load(path)


def text_codec(codec):
    """The same codec without pictures."""
    return Codec(codec.tokenizer, codec._template, codec.section)


LOGPS = OutputSpec(("logps",))


def items(codec, folder):
    """Encoded rows with no, one and two pictures, at different offsets."""
    form = OpenAI()
    examples = [form.read(row) for row in rows(folder)]
    return [item for found in codec.encode_chats(examples) for item in found]


def collation_of(made, codec):
    """How the run of a recipe makes batches."""
    return parts.collation_of(made.stage, codec, packing=made.data.packing)


def picture_probes(made, codec):
    """Rows with pictures on which the run of a recipe proves its packing."""
    return parts.RunParts.around(made, codec, Path(made.model.path)).picture_probes()


def probes(made, codec):
    """What a run with pictures checks packed rows with."""
    packed, noise = collation_of(made, codec), codec.picture_probe()
    alone = [padded(packed).batch([item]).read() for item in noise]
    return [Probe(packed.batch(noise).read(), alone)]


def padded(collation, packing=False):
    """The same with rows of their own."""
    return replace(collation, packing=packing)
