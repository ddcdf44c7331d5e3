"""A stranger's ``config.json`` is judged in one sentence, whatever is in it."""

import json

import pytest
import torch
from transformers import AutoConfig

from surefoot.errors import ModelError
from surefoot.model.adapter_files import check
from surefoot.model.config import extension_of, read_config, size_of
from surefoot.model.loading import load_model
from surefoot.model.section import ModelSection
from surefoot.network.draft import from_config
from surefoot.storage.files import read_json

DEEP = "[" * 100_000 + "]" * 100_000
CONFIGS = {
    "deep": f'{{"model_type": "llama", "x": {DEEP}}}',
    "half": '{"model_type": "\\ud800"}',
    "digits": '{"model_type": "llama", "hidden_size": ' + "9" * 5000 + "}",
    **{
        name: json.dumps({"model_type": "llama", name: -64})
        for name in ("hidden_size", "vocab_size", "num_hidden_layers", "intermediate_size")
    },
    **{
        f"{name} of a billion": json.dumps({"model_type": kind, name: 10**9})
        for kind, name in (
            *(("llama", "hidden_size"), ("llama", "num_hidden_layers"), ("gpt2", "n_layer")),
            ("qwen3_moe", "head_dim"),
        )
    },
    "layers in a part": json.dumps(
        {"model_type": "gemma3", "text_config": {"num_hidden_layers": 10**9}}
    ),
}


@pytest.mark.parametrize("model", ["llama", "qwen2", "gemma3_text", "mistral"])
@pytest.mark.parametrize("name", ["num_attention_heads", "num_key_value_heads"])
def test_a_size_of_zero_is_named(tmp_path, model, name):
    """It was a ZeroDivisionError, which names nothing."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model, name: 0}))
    section = ModelSection(path=str(tmp_path))
    with torch.device("meta"), pytest.raises(ModelError, match=f"{name} is 0"):
        from_config(tmp_path, section)
    with pytest.raises(ModelError, match=f"{name} is 0"):
        load_model(tmp_path, section, dtype="auto", weights={})


@pytest.mark.parametrize("config", CONFIGS)
def test_a_config_that_describes_no_model_is_refused(tmp_path, config):
    (tmp_path / "config.json").write_text(CONFIGS[config])
    for read in (read_config, from_config):
        with pytest.raises(ModelError) as told:
            read(tmp_path, ModelSection(path=str(tmp_path)))
        assert str(tmp_path) in str(told.value)
        assert len(str(told.value)) < 1000


def test_an_adapters_config_that_nests_too_deeply_is_refused(tmp_path):
    for name in ("adapter_config.json", "config.json"):
        (tmp_path / name).write_text(DEEP)
    for read in (check, extension_of):
        with pytest.raises(ModelError, match="nested too deeply"):
            read(tmp_path)


def test_a_large_file_is_no_configuration(tmp_path):
    path = tmp_path / "config.json"
    with path.open("w") as file:
        file.truncate(1 << 40)
    with pytest.raises(OSError, match="more than"):
        read_json(path)


def test_sizes_that_differ_among_layers_are_none():
    """Reading one of Gemma 4's raises an error in transformers."""
    config = AutoConfig.for_model("gemma4_text", num_hidden_layers=6)
    assert config.per_layer_config
    assert size_of(config, "head_dim") is None
    assert size_of(config, "hidden_size") == config.hidden_size
