"""Tiny models, adapters and tokenizers as folders on the disk, made in a blink."""

import json
import os
import shutil
import tempfile
from functools import cache, wraps

import peft
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from tiny import model

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.role == 'assistant' %}{% generation %}{{- message.content + '<|im_end|>' }}"
    "{% endgeneration %}{%- else %}{{- message.content + '<|im_end|>' }}{%- endif %}{{- '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def tokenizer(template=CHATML, extra=()):
    """One token per byte, and the tokens of ChatML."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    rust = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    rust.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=rust, eos_token=SPECIAL[0], pad_token=SPECIAL[0]
    )
    made.add_special_tokens({"additional_special_tokens": [*SPECIAL[1:], *extra]})
    made.chat_template = template
    return made


@cache
def place():
    """Where what is made once is kept: beside the temporary folders of pytest, which deletes them
    all, or until this process ends."""
    folder = os.environ.get("SUREFOOT_TESTS_KEPT")
    return tempfile.TemporaryDirectory(prefix="made-once-", dir=folder)


def made_once(make):
    """``make(folder, ...)`` fills a folder: once in a process, and with copies from then on. The
    next random numbers are those that follow the making."""
    kept = {}

    @wraps(make)
    def made(folder, *asked, **settings):
        key = repr((asked, sorted(settings.items())))
        if key not in kept:
            source = tempfile.mkdtemp(dir=place().name)  # a fork makes others
            make(source, *asked, **settings)
            kept[key] = source, torch.get_rng_state()
        source, after = kept[key]
        # as new files: whoever looks at times sees those of this moment
        shutil.copytree(source, folder, copy_function=shutil.copyfile, dirs_exist_ok=True)
        torch.set_rng_state(after)
        return folder

    return made


@made_once
def save_model(folder, kind="llama", *, template=CHATML, dtype=torch.float32, **changes):
    """A random model with its tokenizer; returns the folder."""
    known = tokenizer(template)
    sizes = {"vocab_size": len(known), "max_position_embeddings": 256, "bos_token_id": None}
    sizes |= {"eos_token_id": known.eos_token_id, "pad_token_id": known.pad_token_id}
    made = model(kind, dtype=dtype, **{**sizes, **changes})
    made.save_pretrained(folder)
    save_tokenizer(known, folder)


def save_tokenizer(known, folder):
    """As the class that transformers takes for the model's type reads it, not only as the file."""
    known.save_pretrained(folder)
    AutoTokenizer.from_pretrained(folder).save_pretrained(folder)


def save_adapter(base, folder, *, template=None, extra=(), seed=1, **settings):
    """A random LoRA adapter of ``base``; with its own tokenizer if a template is given."""
    whole = AutoModelForCausalLM.from_pretrained(base)
    if extra:
        known = tokenizer(template, extra)
        before = whole.get_input_embeddings().num_embeddings
        whole.resize_token_embeddings(len(known), mean_resizing=False)
        with torch.no_grad():  # as training does: at the mean of the old ones
            for module in {whole.get_input_embeddings(), whole.get_output_embeddings()}:
                module.weight[before:] = module.weight[:before].mean(0)
    torch.manual_seed(seed)
    config = peft.LoraConfig(
        **{"target_modules": "all-linear", "r": 4, **settings},
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    wrapped = peft.get_peft_model(whole, config)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "modules_to_save" in name or "magnitude" in name:
                parameter.mul_(1 + 0.1 * torch.randn_like(parameter))
    wrapped.save_pretrained(folder, save_embedding_layers=False)
    if template:
        tokenizer(template, extra).save_pretrained(folder)
    return folder


def edit_json(path, **changes):
    """Set fields of a JSON file."""
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, **changes}))


def save_data(folder, name="sums", rows=None):
    """A dataset_info.json with one alpaca dataset; returns the folder."""
    folder.mkdir(exist_ok=True)
    rows = rows or [
        {"instruction": f"{a}+{b}?", "output": f"{a + b}"} for a in range(4) for b in range(6)
    ]
    (folder / f"{name}.json").write_text(json.dumps(rows))
    path = folder / "dataset_info.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**known, name: {"file_name": f"{name}.json"}}))
    return folder


def save_recipe(folder, **sections):
    """A project in ``folder``: model, data and a recipe of few steps; returns the recipe."""
    if not (folder / "model").exists():
        save_model(folder / "model")
        save_data(folder / "data")
    content = {
        "model": {"path": str(folder / "model")},
        "data": {"datasets": ["sums"], "dataset_dir": str(folder / "data"), "val_size": 6},
        "stage": "sft",
        "train": {
            "output_dir": str(folder / "run"),
            "max_steps": 4,
            "global_batch_size": 4,
            "micro_batch_size": 2,
            "log_steps": None,
            "eval_steps": 2,
        },
        "optim": {"adamw": {"learning_rate": 0.003}},
        "checkpoint": {"save_steps": 2},
        "generate": {"max_new_tokens": 4, "batch_size": 4},
    }
    for name, fields in sections.items():
        is_section = isinstance(fields, dict) and isinstance(content.get(name), dict)
        content[name] = {**content[name], **fields} if is_section else fields
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(content))
    return path
