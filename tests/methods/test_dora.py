"""DoRA's magnitudes in float32: training starts from the base, whatever the base's type."""

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

import folders
from adapted import gpt2, logits, saved, trained
from surefoot.checkpoint.converting.targets import HuggingFaceModel
from surefoot.methods import LoRA
from surefoot.model.section import ModelSection
from surefoot.network.draft import NetworkOptions
from surefoot.network.open import open_network
from surefoot.parallel.world import ALONE
from surefoot.use import export

DORA = LoRA(rank=3, dora=True)
CLOSE = {"atol": 2e-6, "rtol": 1e-5}
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:fan_in_fan_out")


def opened(folder, method=DORA, **section):
    section = ModelSection(path=str(folder), **section)
    return open_network(folder, section, None, ALONE, NetworkOptions(method=method))


@pytest.mark.parametrize("kind", [pytest.param("llama", marks=pytest.mark.proof), "qwen2", "gpt2"])
def test_a_trained_adapter_computes_in_peft_what_it_did_here(kind, tmp_path):
    folder = tmp_path / "model"
    gpt2(folder) if kind == "gpt2" else folders.save_model(folder, kind)
    base = AutoModelForCausalLM.from_pretrained(folder)
    network = opened(folder, LoRA(rank=3, dora=True, dropout=0.2))
    torch.testing.assert_close(logits(network.module), logits(base), **CLOSE)
    network.module.train()
    now = logits(trained(network).module)
    assert (now - logits(base)).abs().max() > 0.01
    theirs = PeftModel.from_pretrained(base, saved(network, tmp_path / "adapter"))
    torch.testing.assert_close(logits(theirs), now, **CLOSE)


def test_over_bfloat16_it_starts_as_the_base_and_merges_into_it(tmp_path):
    folder = folders.save_model(tmp_path / "model", dtype=torch.bfloat16)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    network = opened(folder, dtype="bfloat16")
    assert torch.equal(logits(network.module), logits(base))
    found = export(
        saved(network, tmp_path / "adapter"),
        tmp_path / "merged",
        HuggingFaceModel(base=str(folder)),
    )
    merged = AutoModelForCausalLM.from_pretrained(found, dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(merged[name], t) for name, t in base.state_dict().items())
