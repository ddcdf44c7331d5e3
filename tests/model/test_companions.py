"""What is written beside weights opens in transformers 5 and 4, and is the base's own where nothing
has changed. ``make interop`` opens it in transformers 4."""

import json

import pytest
from transformers import AutoConfig

from folders import CHATML, save_model, save_tokenizer, tokenizer
from surefoot.checkpoint.disk.folder import tokenizer_of
from surefoot.model.tokenizer import load_tokenizer
from surefoot.model.weights import model_files, tokenizer_files
from surefoot.use.exporting.conversion import whole_model
from surefoot.use.model_loading import find_parts
from tiny import model
from zoo.architectures import build

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 32}


@pytest.mark.parametrize("scaling", [None, LLAMA3], ids=["plain", "llama3"])
def test_a_configuration_has_both_forms_of_rope_which_say_the_same(scaling, tmp_path):
    rope = {"rope_theta": 5e5, **(scaling or {"rope_type": "default"})}
    made = model("llama", rope_parameters=rope)
    written = model_files(made, None, ())["config.json"]
    stored = json.loads(written)
    assert (stored["rope_theta"], stored.get("rope_scaling")) == (5e5, scaling)
    (tmp_path / "config.json").write_bytes(written)
    assert AutoConfig.from_pretrained(tmp_path).rope_parameters == rope


def test_the_rope_of_types_of_layers_has_the_names_of_transformers_4(tmp_path):
    full, local = {"rope_theta": 2e6, "rope_type": "linear", "factor": 8.0}, {"rope_theta": 5e3}
    local |= {"rope_type": "default"}
    rope = {"full_attention": full, "sliding_attention": local}
    written = model_files(build("gemma3_text", rope_parameters=rope), None, ())["config.json"]
    stored = json.loads(written)
    assert (stored["rope_theta"], stored["rope_local_base_freq"]) == (2e6, 5e3)
    assert stored["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    (tmp_path / "config.json").write_bytes(written)
    assert AutoConfig.from_pretrained(tmp_path).rope_parameters == rope


@pytest.mark.parametrize(
    ("name", "key", "kinds"),
    [
        ("granitemoehybrid", "layer_types", {"mamba", "attention"}),
        ("zamba2", "layers_block_type", {"mamba", "hybrid"}),
        ("qwen3_next", "layer_types", {"linear_attention", "full_attention"}),
    ],
)
def test_kinds_of_layers_have_the_names_that_transformers_4_knows(name, key, kinds, tmp_path):
    made = build(name)
    written = model_files(made, None, ())["config.json"]
    assert {*json.loads(written)[key]} == kinds
    (tmp_path / "config.json").write_bytes(written)
    read = AutoConfig.from_pretrained(tmp_path)
    assert list(getattr(read, key)) == list(getattr(made.config, key))
    made.save_pretrained(tmp_path / "base")  # in the names of 5
    save_tokenizer(tokenizer(), tmp_path / "base")
    _, small = whole_model(find_parts(tmp_path / "base"))
    assert {*json.loads(small["config.json"])[key]} == kinds


def test_an_infinite_limit_is_left_to_the_default_since_transformers_4_cannot_read_it(tmp_path):
    made = build("mamba2")
    written = model_files(made, None, ())["config.json"]
    assert b"Infinity" not in written
    (tmp_path / "config.json").write_bytes(written)
    limit = AutoConfig.from_pretrained(tmp_path).time_step_limit
    assert tuple(limit) == tuple(made.config.time_step_limit) == (0.0, float("inf"))


@pytest.fixture
def base(tmp_path):
    """With two chat templates, and files as transformers 4 writes them."""
    folder = save_model(tmp_path / "base")
    (folder / "chat_template.jinja").unlink()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["additional_special_tokens"] = config.pop("extra_special_tokens")
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config["chat_template"] = [
        {"name": "default", "template": CHATML},
        {"name": "tool_use", "template": "tools"},
    ]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "special_tokens_map.json").write_text('{"eos_token": "<|endoftext|>"}')
    return folder


def test_a_tokenizer_that_has_not_changed_keeps_the_files_of_its_base(base):
    known, own = load_tokenizer(base), tokenizer_of(base)
    known("a call", padding="max_length", max_length=20, truncation=True)  # which leaves a state
    known.chat_template = CHATML  # one of the two that it had
    assert tokenizer_files(known, own) == own


def test_another_template_changes_the_template_alone_and_named_ones_stay(base, tmp_path):
    known, own = load_tokenizer(base), tokenizer_of(base)
    known.chat_template = "other"
    known.pad_token = "<|im_end|>"
    found = tokenizer_files(known, own)
    assert found["tokenizer.json"] == own["tokenizer.json"]
    config = json.loads(found["tokenizer_config.json"])
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert config["additional_special_tokens"] == ["<|im_start|>", "<|im_end|>"]
    assert config["pad_token"] == "<|im_end|>"
    assert opened(found, tmp_path / "a").chat_template == {"default": "other", "tool_use": "tools"}


def test_new_tokens_are_written_so_that_transformers_4_opens_them(base, tmp_path):
    known = load_tokenizer(base, new_special_tokens=["<new>"])
    known.chat_template = "other"
    found = tokenizer_files(known, tokenizer_of(base))
    config = json.loads(found["tokenizer_config.json"])
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert isinstance(config["additional_special_tokens"], list)
    again = opened(found, tmp_path / "a")
    assert again.get_vocab() == known.get_vocab()
    assert again.chat_template == {"default": "other", "tool_use": "tools"}


def opened(files, folder):
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return load_tokenizer(folder)
