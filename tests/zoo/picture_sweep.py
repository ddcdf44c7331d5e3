"""What each type that reads pictures can do, found by doing it: one row of the second table in
docs/architectures.md.

The reference is transformers alone: its processor and its model, row by row, without packing.
"""

import json
import shutil
from inspect import signature

import torch
import torch.nn.functional as F
from PIL import Image
from transformers import AutoModelForImageTextToText

import pictures
from surefoot.errors import ModelError, SurefootError
from surefoot.recipe.recipe import read
from surefoot.recipe.recipe_data import open_codec
from zoo import picture_models, sweep

COLUMNS = ["full", "packed", "lora"]
NOT_TRIED = "not tried"


def rows(folder):
    """Rows with one, two and no pictures; all of them are one global batch."""
    made = []
    for number, sizes in enumerate([[(64, 64)], [(96, 40), (56, 84)], [], [(64, 64)]]):
        names = [
            pictures.picture(folder / f"{number}_{at}.png", size, seed=10 * number + at)
            for at, size in enumerate(sizes)
        ]
        question = "<image> and ".join(["what" * (number + 1), *["this"] * len(names)])
        turns = [{"role": "user", "content": question}]
        turns += [{"role": "assistant", "content": f"it is number {number}"}]
        made.append({"messages": turns, "images": names})
    return made


def prepare(name, folder):
    """The model ``name``, its processor, and a recipe for rows with pictures."""
    (folder / "model").mkdir()
    data = rows(folder)
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, data)) + "\n")
    processor = picture_models.save(folder / "model", name)
    recipe = sweep.recipe_of(folder, datasets=[str(folder / "rows.jsonl")], cutoff_len=2000)
    codec = open_codec(read(recipe, {}), folder / "model")
    if codec.media is None:
        raise ModelError(codec.why_text)
    try:
        expected = by_plain_loop(folder, processor, data)
        assert all(map(torch.isfinite, torch.tensor(expected)))
    except Exception as error:
        raise picture_models.UnbuiltError(f"{type(error).__name__}: {error}") from error
    return recipe, expected


def by_plain_loop(folder, processor, data):
    """The losses of AdamW on rows one at a time, by transformers and torch alone."""
    model = AutoModelForImageTextToText.from_pretrained(folder / "model").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=sweep.RATE, weight_decay=0.0)
    encoded = [inputs_of(folder, processor, row) for row in data]
    kinds = "mm_token_type_ids"  # which some processors give if asked alone
    for inputs, _ in encoded:
        if kinds in signature(model.forward).parameters and kinds not in inputs:
            ids = inputs["input_ids"].tolist()
            inputs[kinds] = torch.tensor(processor.create_mm_token_type_ids(ids))
    losses = []
    for _ in range(3):
        total, count = 0.0, 0
        for inputs, num_trained in encoded:
            labels = inputs["input_ids"][0, -num_trained:]
            logits = model(**inputs, use_cache=False).logits[0, -num_trained - 1 : -1]
            total = total + F.cross_entropy(logits, labels, reduction="sum")
            count += num_trained
        (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total.detach() / count))
    return losses


def inputs_of(folder, processor, row):
    """What the model gets of a row by its own processor, and its tokens that are trained."""
    tokens, names = processor.tokenizer, row["images"]
    question, answer = (message["content"] for message in row["messages"])
    parts = []
    for number, text in enumerate(question.split("<image>")):
        parts += ([{"type": "image"}] if number else []) + [{"type": "text", "text": text}]
    turns = [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]
    text = tokens.apply_chat_template(turns, tokenize=False)
    images = [[Image.open(folder / name).convert("RGB") for name in names]] if names else None
    inputs = processor(text=[text], images=images, return_tensors="pt")
    return inputs, len(tokens(answer + "<|im_end|>", add_special_tokens=False)["input_ids"])


def full(recipe, expected, folder):
    """Padded rows have the losses of a plain loop."""
    must_be_close(sweep.trained(recipe, folder / "full"), expected)


def packed(recipe, expected, folder):
    """Packed rows have the losses of a plain loop."""
    found = sweep.trained(recipe, folder / "packed", **{"data.packing": True})
    must_be_close(found, expected)


def must_be_close(found, expected):
    """Losses that differ by rounding only: AdamW makes as large a step of a gradient that is none
    but rounding, by which later losses differ more (Qianfan-OCR's by 1.3e-5)."""
    sweep.must_be_close(found[:1], expected[:1])
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-4, atol=1e-5)


def lora(recipe, expected, folder):
    """LoRA of the default targets trains."""
    losses = sweep.trained(recipe, folder / "lora", **sweep.LORA)
    assert losses[-1] < losses[0]


CHECKS = dict(zip(COLUMNS, (full, packed, lora), strict=True))


def row(name, folder, columns=COLUMNS):
    """The cells of a type, by column, each with its reason."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        recipe, expected = prepare(name, folder)
    except picture_models.UnbuiltError as error:
        return dict.fromkeys(columns, (NOT_TRIED, str(error)))
    except SurefootError as error:
        return dict.fromkeys(columns, ("refused", str(error)))
    except Exception as error:
        return dict.fromkeys(columns, ("fails", f"{type(error).__name__}: {error}"))
    try:
        return {
            column: sweep.outcome(
                lambda *_, column=column: CHECKS[column](recipe, expected, folder), recipe, folder
            )
            for column in columns
        }
    finally:
        shutil.rmtree(folder, ignore_errors=True)
