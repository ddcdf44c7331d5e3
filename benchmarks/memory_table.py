"""The table of docs/how-to/memory.md: for a GPU and a model, what ``surefoot plan`` makes fit.

    python benchmarks/memory_table.py [MODEL ...]
    python benchmarks/memory_table.py rows [MODEL]

The second prints the table of docs/how-to/memory.md: the longest row of LoRA that fits on a GPU
of 80 GB, as ``surefoot plan --longest-row`` finds it.

Models are Qwen3's configurations; no weights are read, and no GPU is needed. All examples have as
many tokens as data.cutoff_len allows, so no run with shorter ones needs more.
"""

import json
import sys
import tempfile
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from surefoot.recipe.recipe import read
from surefoot.use.estimate._rank_memory import Machine
from surefoot.use.estimate.plan import fastest_fit, trials_of
from surefoot.use.estimate.row_lengths import longest_rows

TOKENS = 2048
SHARED = {"head_dim": 128, "num_key_value_heads": 8, "vocab_size": 151_936}
MODELS = {  # billions of parameters -> the configuration
    "0.6B": (1024, 3072, 28, 16, True),
    "1.7B": (2048, 6144, 28, 16, True),
    "4B": (2560, 9728, 36, 32, True),
    "8B": (4096, 12_288, 36, 32, False),
    "32B": (5120, 25_600, 64, 64, False),
}
GPUS = (16, 24, 48, 80)  # GB
BF16 = {"dtype": "bfloat16"}
METHODS = {  # what to change in the recipe, from the most to the least memory
    "full": {"method": "full"},
    "full, bfloat16 weights": {"method": "full", "model": BF16},
    "badam": {
        "method": "badam",
        "model": BF16,
        "optim": {"adamw": {"bf16_weights": "master"}},
    },
    "lora": {"method": "lora", "model": BF16},
    "lora, 4-bit base": {"method": "lora", "model": {**BF16, "quantization_bit": 4}},
}


def write_model(folder, name):
    """``config.json`` and a tokenizer of one character."""
    hidden, inner, layers, heads, is_tied = MODELS[name]
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "tie_word_embeddings": is_tied,
        "torch_dtype": "bfloat16",
        "max_position_embeddings": 40_960,
        **SHARED,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)


def write_tokenizer(folder, **settings):
    """A tokenizer of two characters."""
    inner = Tokenizer(models.WordLevel({"a": 0, "[end]": 1, "b": 2}, unk_token="a"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="[end]", pad_token="[end]")
    for name, value in settings.items():
        setattr(made, name, value)
    made.save_pretrained(folder)


def recipe_of(folder, method):
    """A recipe of 16 examples a step, whose rows are all of full length."""
    data = folder / "data"
    data.mkdir(exist_ok=True)
    row = json.dumps({"text": "a" * (TOKENS + 10)})
    (data / "long.jsonl").write_text(f"{row}\n" * 32)
    entry = {"file_name": "long.jsonl", "columns": {"prompt": "text"}}
    (data / "dataset_info.json").write_text(json.dumps({"long": entry}))
    chosen = METHODS[method]
    return read(
        {
            "model": {"path": str(folder / "model"), **chosen.get("model", {})},
            "data": {
                "dataset_dir": str(data),
                "datasets": ["long"],
                "cutoff_len": TOKENS,
                "cache_dir": str(folder / "cache"),
            },
            "method": chosen["method"],
            "stage": "pt",
            "train": {
                "output_dir": str(folder / "run"),
                "max_steps": 2,
                "global_batch_size": 16,
                "micro_batch_size": 1,
            },
            "optim": chosen.get("optim", {"adamw": {}}),
        }
    )


def row_of(folder, name, gigabytes, methods=METHODS):
    """The first method that fits, with what to set: the cells of a row."""
    write_model(folder / "model", name)
    for method in methods:
        fit = fastest_fit(recipe_of(folder, method), Machine(1, on_gpu=True), gigabytes * 10**9)
        if fit is not None:
            needed = f"{fit.num_bytes / 1e9:.1f} GB"
            return method, f"`{fit.policy}`", str(fit.micro_batch_size), needed
    return "—", "", "", "does not fit on one GPU"


def rows_of(folder, name, method="lora", gigabytes=80):
    """The longest row under each policy: the cells of rows."""
    write_model(folder / "model", name)
    machine = Machine(1, on_gpu=True, capacity=gigabytes * 10**9)
    for row in longest_rows(trials_of(recipe_of(folder, method), machine), machine):
        moved = f"{row.main_memory / 1e9:.0f} GB" if row.main_memory else ""
        takes = f"{row.num_bytes / 1e9:.1f} GB"
        yield f"`{row.policy}`", f"{row.tokens:,}", f"{row.per_token / 1e3:,.0f} KB", takes, moved


def print_rows(name="8B"):
    """Print the table of the longest rows of a model."""
    print("| `gradient_checkpointing` | longest row | a token takes | takes | main memory |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for cells in rows_of(Path(folder), name):
            print("|", " | ".join(cells), "|", flush=True)


def main(names):
    """Print the table of the models of these names."""
    if names[:1] == ["rows"]:
        print_rows(*names[1:])
        return
    print("| GPU | model | method | `gradient_checkpointing` | `micro_batch_size` | takes |")
    print("|---|---|---|---|---|---|")
    for name in names:
        for gigabytes in GPUS:
            with tempfile.TemporaryDirectory() as folder:
                cells = row_of(Path(folder), name, gigabytes)
            print("|", " | ".join([f"{gigabytes} GB", name, *cells]), "|", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or list(MODELS))
