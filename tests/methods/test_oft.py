"""Rotations through PEFT: they start as the base, are saved as PEFT's, and continue."""

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

import folders
import tiny
from adapted import logits, saved, trained
from surefoot.checkpoint.converting.targets import HuggingFaceModel
from surefoot.errors import CheckpointError, RecipeError
from surefoot.methods import OFT, LoRA
from surefoot.model.section import ModelSection
from surefoot.network.draft import NetworkOptions
from surefoot.network.open import open_network
from surefoot.parallel.world import ALONE
from surefoot.use import export

METHOD = OFT(block_size=4, dropout=0.3)
CLOSE = {"atol": 1e-6, "rtol": 1e-5}
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return folders.save_model(tmp_path_factory.mktemp("oft"), num_hidden_layers=2)


def opened(folder, method, **section):
    section = ModelSection(path=str(folder), **section)
    return open_network(folder, section, None, ALONE, NetworkOptions(method=method))


def test_it_starts_as_the_base_opens_in_peft_and_continues(folder, tmp_path):
    base = AutoModelForCausalLM.from_pretrained(folder)
    network = opened(folder, OFT(block_size=4, modules_to_save=("lm_head",)))
    torch.testing.assert_close(logits(network.module), logits(base), **CLOSE)
    assert {row.trained for row in network.coverage} >= {"yes, by an adapter", "yes"}
    now = logits(trained(network).module)
    assert (now - logits(base)).abs().max() > 0.01
    adapter = saved(network, tmp_path / "adapter")
    torch.testing.assert_close(logits(PeftModel.from_pretrained(base, adapter)), now, **CLOSE)
    again = opened(folder, OFT(block_size=4), adapter=adapter)
    torch.testing.assert_close(logits(again.module), now, **CLOSE)
    with pytest.raises(RecipeError, match=r"method: lora, but model.adapter is .*OFT; name that"):
        opened(folder, LoRA(), adapter=adapter)
    with pytest.raises(
        CheckpointError, match=r"peft_type OFT cannot be merged.*a rotation.*merge_and_unload"
    ):
        export(adapter, tmp_path / "merged", HuggingFaceModel(base=str(folder)))


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (OFT(block_size=5), "block_size: 5, but .* has 32 inputs; choose a divisor"),
        (OFT(targets=("embed_tokens",)), r"oft\.targets: .*embed_tokens is no linear layer"),
        (OFT(targets=("q_prj",)), r"^method\.oft\.targets: 'q_prj' is not in the model"),
        (OFT(modules_to_save=("head",)), r"oft\.modules_to_save: no module 'head'"),
    ],
)
def test_what_cannot_be_rotated_is_refused(method, words):
    with pytest.raises(RecipeError, match=words):
        method.apply(tiny.model())


def test_experts_stay_as_they_are():
    found = OFT(block_size=4).apply(tiny.model("mixtral"))
    assert {
        n.split(".oft_R")[0].rpartition(".")[2]
        for n, p in found.named_parameters()
        if p.requires_grad
    } == {"q_proj", "k_proj", "v_proj", "o_proj"}
    with pytest.raises(RecipeError, match="is a parameter, which PEFT cannot adapt so"):
        OFT(targets=("gate_up_proj",)).apply(tiny.model("mixtral"))
