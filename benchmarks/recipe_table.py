"""The table of docs/how-to/recipes.md: what ``surefoot plan`` says of each of examples/recipes.

    python benchmarks/recipe_table.py [NAME ...]

Models are their configurations; no weights are read, and neither a GPU nor a network is needed. All
examples have as many tokens as data.cutoff_len allows, so no run with shorter ones needs more.
"""

import json
import sys
import tempfile
from copy import deepcopy
from pathlib import Path

from memory_table import write_tokenizer

from surefoot.recipe.recipe import load
from surefoot.use.estimate._rank_memory import Machine
from surefoot.use.estimate.plan import make_plan

RECIPES = Path(__file__).parent.parent / "examples" / "recipes"
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}[end]"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
SHARED = {"torch_dtype": "bfloat16", "eos_token_id": 1, "bos_token_id": 0, "pad_token_id": 1}
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "vocab_size": 201_088,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": False,
}
MODELS = {  # the first part of a recipe's name -> the model's configuration
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151_936,
        "max_position_embeddings": 40_960,
        "tie_word_embeddings": False,
    },
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": False,
    },
    "gemma": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "mm_tokens_per_image": 256,
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 2560,
            "intermediate_size": 10_240,
            "num_hidden_layers": 34,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "sliding_window": 1024,
            "query_pre_attn_scalar": 256,
            "vocab_size": 262_208,
            "max_position_embeddings": 131_072,
        },
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "image_size": 896,
            "patch_size": 14,
        },
    },
    "gpt-oss": GPT_OSS,
}


def model_of(name):
    """The configuration of the model of the recipe ``name``."""
    model = name.rpartition("-")[0]
    if model == "gpt-oss" and not name.endswith("-full"):
        skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens"]
        quantized = {"quant_method": "mxfp4", "modules_to_not_convert": [*skipped, "lm_head"]}
        return {**GPT_OSS, "quantization_config": quantized}
    return MODELS[model]


def opened(name, folder, num_tokens=None, **changes):
    """The recipe ``name`` with its model's configuration, a tokenizer of two letters, and rows of
    ``num_tokens`` (None: as many as it allows), all in ``folder``. ``changes`` are of every part of
    the configuration: of the language model, and of one for pictures."""
    model, data = folder / "model", folder / "rows.jsonl"
    model.mkdir(parents=True)
    config = deepcopy({**SHARED, **model_of(name)})
    for part in (config.get("text_config", config), config.get("vision_config", {})):
        part.update({key: value for key, value in changes.items() if key in part})
    (model / "config.json").write_text(json.dumps(config))
    write_tokenizer(model, chat_template=TEMPLATE)
    recipe = load(RECIPES / f"{name}.yaml")
    length = num_tokens or recipe.data.cutoff_len
    long = "a" * length
    row = {"prompt": "a" * (length // 2), "completion": long}
    if name.endswith("-dpo"):
        row = {"prompt": row["prompt"], "chosen": long, "rejected": f"b{long}"}
    if name.endswith("-grpo"):
        row = {"prompt": row["prompt"], "answer": "a"}
    data.write_text((json.dumps(row) + "\n") * 64)
    overrides = {
        "model.path": str(model),
        "data.datasets": [str(data)],
        "data.on_too_long": "truncate",
        "data.cache_dir": str(folder / "cache"),
        "train.output_dir": str(folder / "run"),
    }
    return load(RECIPES / f"{name}.yaml", overrides)


def planned(name, folder, num_tokens=None, **changes):
    """The plan of the recipe ``name`` on GPUs, as many as it names; arguments as of ``opened``."""
    recipe = opened(name, folder, num_tokens, **changes)
    return make_plan(recipe, Machine(recipe.parallel.num_processes or 1, on_gpu=True))


def row_of(name):
    """The row of the page."""
    with tempfile.TemporaryDirectory() as folder:
        plan = planned(name, Path(folder) / name)
    model, _, kind = name.rpartition("-")
    gpus, share = plan.machine.num_processes, plan.trained_parameters / plan.parameters
    cells = [
        *(f"`{model}`", f"[{kind}](../../examples/recipes/{name}.yaml)"),
        *(f"{plan.parameters / 1e9:.1f} B", f"{100 * share:.3g} %"),
        *(str(gpus), f"{plan.total / 1e9:.1f} GB", f"{plan.saving.size.total / 1e9:.1f} GB"),
    ]
    return "| " + " | ".join(cells) + " |"


def main(names):
    """Print the table."""
    print("| model | recipe | parameters | trainable | GPUs | memory of each | one checkpoint |")
    print("|---|---|---|---|---|---|---|")
    for name in names:
        print(row_of(name), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or sorted(path.stem for path in RECIPES.glob("*.yaml")))
