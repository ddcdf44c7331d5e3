"""An adapter goes onto its own base and onto no other."""

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

import tiny
from folders import edit_json, save_adapter, save_model
from surefoot.errors import ModelError
from surefoot.model.pretrained.adapter import attach, attach_empty

IDS = torch.arange(60, 76)[None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    save_model(folder / "base")
    save_model(folder / "deeper", num_hidden_layers=4)
    save_model(folder / "wider", intermediate_size=64)
    save_adapter(folder / "base", folder / "adapter")
    save_adapter(folder / "deeper", folder / "deep")
    return folder


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder)


def test_an_attached_adapter_is_pefts_own(folder):
    expected = PeftModel.from_pretrained(load(folder / "base"), folder / "adapter").eval()
    found = attach(load(folder / "base"), folder / "adapter").eval()
    assert torch.equal(found(IDS).logits, expected(IDS).logits)
    assert not any(p.requires_grad for p in found.parameters())


def test_one_to_go_on_from_can_learn(folder):
    found = attach(load(folder / "base"), folder / "adapter", trainable=True)
    assert all(("lora_" in n) == p.requires_grad for n, p in found.named_parameters())


@pytest.mark.parametrize(
    ("base", "adapter", "reason"),
    [
        ("wider", "adapter", r"size mismatch.*\[48.*\[64|size mismatch"),
        ("base", "deep", r"14 of its 56 tensors do not exist.*layers\.3"),
        ("deeper", "adapter", r"0 of its 42 tensors.*14 are missing.*layers\.3"),
    ],
)
def test_an_adapter_of_another_model_is_refused(folder, base, adapter, reason):
    with pytest.raises(
        ModelError, match=rf"an adapter of another model, not of .*{base}.*({reason})"
    ):
        attach(load(folder / base), folder / adapter)


def test_an_adapter_whose_modules_the_model_has_not_is_refused(folder, tmp_path):
    save_adapter(folder / "base", tmp_path)
    edit_json(tmp_path / "adapter_config.json", target_modules=["c_attn"])
    with pytest.raises(ModelError, match=r"another model.*c_attn.*not found"):
        attach(load(folder / "base"), tmp_path)


@pytest.mark.parametrize("tokens", [False, 3, [1.5], {"embed_tokens": "all"}])
def test_tokens_that_are_no_list_of_ids_are_refused(tokens, folder, tmp_path):
    save_adapter(folder / "base", tmp_path)
    edit_json(tmp_path / "adapter_config.json", trainable_token_indices=tokens)
    with pytest.raises(ModelError, match=r"trainable_token_indices is .* expected lists of token"):
        attach(load(folder / "base"), tmp_path)


def test_a_damaged_adapter_is_refused(folder, tmp_path):
    save_adapter(folder / "base", tmp_path)
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(ModelError, match="damaged or truncated"):
        attach(load(folder / "base"), tmp_path)
    weights.unlink()
    (tmp_path / "adapter_model.bin").touch()
    with pytest.raises(ModelError, match="a pickle, which is never read"):
        attach(load(folder / "base"), tmp_path)
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(ModelError, match="not JSON"):
        attach(load(folder / "base"), tmp_path)
    (tmp_path / "adapter_config.json").unlink()
    with pytest.raises(ModelError, match=r"no adapter_config\.json"):
        attach(load(folder / "base"), tmp_path)


def test_a_folder_without_an_adapter_is_refused_by_those_that_read_no_values_too(folder, tmp_path):
    with pytest.raises(ModelError, match=r"no adapter_config\.json; expected the local folder"):
        attach_empty(tiny.model("llama"), tmp_path)
    (tmp_path / "second").mkdir()
    (tmp_path / "second" / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"it contains several \(second\): name one"):
        attach_empty(tiny.model("llama"), tmp_path)
