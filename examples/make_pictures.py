"""Draw the figures of ``pictures.yaml``, and build the small model that learns to name them.

A picture shows one figure of four colours and four shapes, somewhere near its middle. The model is
a Gemma 3 with a vision tower, of random weights, whose tokenizer has the words of the questions.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3Processor,
    PreTrainedTokenizerFast,
)
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

HERE = Path(__file__).parent
COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (50, 80, 220),
    "yellow": (235, 200, 40),
}
SHAPES = ("circle", "square", "triangle", "cross")
QUESTIONS = ("<image>What is this?", "Name the figure. <image>", "<image>Which figure do you see?")
SIZE = 56  # pixels a side; a patch has 14, and four patches become one token
SPECIAL = {
    "pad_token": "<pad>",
    "eos_token": "<end_of_turn>",
    "bos_token": "<bos>",
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "image_token": "<image_soft_token>",
}
CHAT_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content %}
            {{- '<start_of_image>' if part.type == 'image' else part.text }}
        {%- endfor %}
    {%- endif %}
    {{- '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<start_of_turn>model\\n' }}
{%- endif %}
"""


def draw_figure(colour: str, shape: str, rng: random.Random) -> Image.Image:
    """One figure on a light ground; its place, size, ground and colour differ a little."""
    ground = tuple(rng.randint(225, 255) for _ in range(3))
    picture = Image.new("RGB", (SIZE, SIZE), ground)
    pen = ImageDraw.Draw(picture)
    x, y = (SIZE / 2 + rng.uniform(-3, 3) for _ in range(2))
    r = rng.uniform(15, 20)
    fill = tuple(min(255, max(0, c + rng.randint(-20, 20))) for c in COLOURS[colour])
    if shape == "circle":
        pen.ellipse((x - r, y - r, x + r, y + r), fill=fill)
    elif shape == "square":
        pen.rectangle((x - r, y - r, x + r, y + r), fill=fill)
    elif shape == "triangle":
        corners = [
            (x + r * math.sin(a), y - r * math.cos(a))
            for a in (0, 2 * math.pi / 3, 4 * math.pi / 3)
        ]
        pen.polygon(corners, fill=fill)
    else:
        pen.rectangle((x - r, y - r / 3, x + r, y + r / 3), fill=fill)
        pen.rectangle((x - r / 3, y - r, x + r / 3, y + r), fill=fill)
    return picture


def write_rows(folder: Path, name: str, num_rows: int, seed: int) -> None:
    """The rows of a dataset as a JSON Lines file, and their pictures beside it."""
    rng = random.Random(f"{seed} {name}")
    pictures = folder / "figures"
    pictures.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as lines:
        for i in range(num_rows):
            colour, shape = rng.choice(list(COLOURS)), rng.choice(SHAPES)
            path = pictures / f"{name}_{i:05}.png"
            draw_figure(colour, shape, rng).save(path)
            row = {
                "messages": [
                    {"role": "user", "content": rng.choice(QUESTIONS)},
                    {"role": "assistant", "content": f"a {colour} {shape}"},
                ],
                "images": [f"figures/{path.name}"],
            }
            lines.write(json.dumps(row) + "\n")


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer that has the words of questions and answers."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=["<unk>", *SPECIAL.values(), "<start_of_turn>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    answers = [f"a {colour} {shape}" for colour in COLOURS for shape in SHAPES]
    bpe.train_from_iterator([*QUESTIONS, *answers, "user\n", "model\n"] * 3, trainer)
    tokens = {name: token for name, token in SPECIAL.items() if name[:3] in ("pad", "eos", "bos")}
    others = {name: token for name, token in SPECIAL.items() if name not in tokens}
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        **tokens,
        extra_special_tokens=others,
        chat_template=CHAT_TEMPLATE,
        model_max_length=256,
        clean_up_tokenization_spaces=False,
    )


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Gemma3ForConditionalGeneration:
    """A Gemma 3 with a SigLIP tower, of 0.4 million random weights."""
    text = {
        "vocab_size": -(-len(tokenizer) // 64) * 64,
        "hidden_size": 96,
        "intermediate_size": 192,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "sliding_window": 64,
        "max_position_embeddings": 256,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "initializer_range": 0.06,
    }
    vision = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "image_size": SIZE,
        "patch_size": 7,
    }
    ids = {
        f"{name}_index": tokenizer.convert_tokens_to_ids(SPECIAL[token])
        for name, token in (
            ("boi_token", "boi_token"),
            ("eoi_token", "eoi_token"),
            ("image_token", "image_token"),
        )
    }
    torch.manual_seed(seed)
    return Gemma3ForConditionalGeneration(
        Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=16, **ids)
    )


def main() -> None:
    """Write the pictures, their rows and the untrained model."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--out", type=Path, default=HERE / "pictures")
    parser.add_argument("--train", type=int, default=6400, help="rows to train on")
    parser.add_argument("--held-out", type=int, default=200, help="rows to evaluate on")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    write_rows(arguments.out, "figures_train", arguments.train, arguments.seed)
    write_rows(arguments.out, "figures_held_out", arguments.held_out, arguments.seed)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, arguments.seed)
    images = Gemma3ImageProcessorPil(size={"height": SIZE, "width": SIZE})
    processor = Gemma3Processor(images, tokenizer, chat_template=CHAT_TEMPLATE, image_seq_length=16)
    model.save_pretrained(arguments.out / "base-model")
    processor.save_pretrained(arguments.out / "base-model")
    print(f"{arguments.out}: {model.num_parameters():,} weights, {len(tokenizer):,} tokens")


if __name__ == "__main__":
    main()
