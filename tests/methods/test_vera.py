"""Vectors between shared matrices, through PEFT: training, resume, merge and export."""

import json

import pytest
import torch
from peft import PeftModel
from peft.mapping import PEFT_TYPE_TO_PREFIX_MAPPING
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import folders
import tiny
from adapted import gpt2, logits, saved, trained
from surefoot.checkpoint.converting.targets import HuggingFaceModel
from surefoot.errors import CheckpointError, ModelError, RecipeError
from surefoot.methods import VeRA
from surefoot.model.section import ModelSection
from surefoot.network.draft import NetworkOptions
from surefoot.network.open import open_network
from surefoot.parallel.world import ALONE
from surefoot.plugins.gguf.targets import GGUFAdapter
from surefoot.storage.weight_files import KINDS
from surefoot.use import export

METHOD = VeRA(rank=24, dropout=0.3)
CLOSE = {"atol": 1e-6, "rtol": 1e-5}


@pytest.fixture(scope="module", params=["llama", "gpt2"])  # gpt2: its weights are transposed
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    return folders.save_model(path) if request.param == "llama" else gpt2(path)


def opened(folder, method, **section):
    section = ModelSection(path=str(folder), **section)
    return open_network(folder, section, None, ALONE, NetworkOptions(method=method))


@pytest.fixture(scope="module")
def adapter(folder, tmp_path_factory):
    """Trained by Surefoot, with its logits."""
    network = trained(opened(folder, VeRA(rank=24, modules_to_save=("lm_head",))))
    return saved(network, tmp_path_factory.mktemp("vera") / "adapter"), logits(network.module)


def test_it_starts_as_the_base_opens_in_peft_and_continues(folder, adapter):
    base = AutoModelForCausalLM.from_pretrained(folder)
    network = opened(folder, METHOD)
    torch.testing.assert_close(logits(network.module), logits(base), **CLOSE)
    assert "yes, by an adapter" in {row.trained for row in network.coverage}
    assert all("vera_lambda" in name for name in network.named)
    path, now = adapter
    assert (now - logits(base)).abs().max() > 0.01
    torch.testing.assert_close(logits(PeftModel.from_pretrained(base, path)), now, **CLOSE)
    again = opened(folder, VeRA(modules_to_save=("lm_head",)), adapter=path)
    torch.testing.assert_close(logits(again.module), now, **CLOSE)


def test_it_merges_as_peft_does_and_in_gguf_only_merged(folder, adapter, tmp_path):
    path, now = adapter
    base = AutoModelForCausalLM.from_pretrained(folder)
    theirs = PeftModel.from_pretrained(base, path).merge_and_unload()
    export(path, tmp_path / "merged", HuggingFaceModel(base=str(folder)))
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    for name, tensor in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], tensor, **CLOSE)
    torch.testing.assert_close(logits(ours), now, **CLOSE)


@pytest.mark.parametrize("folder", ["llama"], indirect=True, scope="module")
def test_a_gguf_adapter_cannot_contain_it(folder, adapter, tmp_path):
    with pytest.raises(ModelError, match=r"contain .*an adapter of type VERA; export it merged"):
        export(adapter[0], tmp_path / "a", GGUFAdapter(base=str(folder), quantize="f16"))


def test_matrices_that_are_not_in_the_file_are_missed(folder, adapter, tmp_path):
    path = tmp_path / "left"
    path.mkdir()
    tensors = load_file(adapter[0] / "adapter_model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if ".vera_A" not in name}
    save_file(kept, path / "adapter_model.safetensors")
    config = json.loads((adapter[0] / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps(config | {"save_projection": False}))
    with pytest.raises(CheckpointError, match=r"vera_A is missing \(save_projection: false\)"):
        export(path, tmp_path / "merged", HuggingFaceModel(base=str(folder)))


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ({"targets": ("embed_tokens",)}, r"vera\.targets: .*embed_tokens is no linear layer"),
        ({"targets": ("q_prj",)}, r"^method\.vera\.targets: 'q_prj' is not in the model"),
        ({"modules_to_save": ("head",)}, r"vera\.modules_to_save: no module 'head'"),
    ],
)
def test_what_cannot_be_adapted_is_refused(method, words):
    with pytest.raises(RecipeError, match=words):
        VeRA(**method).apply(tiny.model())
    with pytest.raises(ValueError, match="initial_scale is 0, so no vector"):
        VeRA(initial_scale=0.0)


def test_the_kinds_of_names_are_those_of_peft():
    theirs = {prefix.split("_")[0] for prefix in PEFT_TYPE_TO_PREFIX_MAPPING.values()}
    assert theirs >= set(KINDS) >= {"lora", "oft", "vera"}
