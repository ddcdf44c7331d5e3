"""Frozen adapters below the trained one: their sum is where it starts, and what is saved."""

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

import folders
from adapted import logits, saved, trained
from surefoot.errors import ModelError, RecipeError
from surefoot.methods import LoRA
from surefoot.model.section import ModelSection
from surefoot.network._coverage import table
from surefoot.network.draft import NetworkOptions
from surefoot.network.open import open_network
from surefoot.parallel.world import ALONE
from surefoot.recipe.recipe import read

SETTINGS = {
    "one": {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "up_proj"]},
    "root": {
        "r": 2,
        "lora_alpha": 4,
        "use_rslora": True,
        "target_modules": ["q_proj", "v_proj"],
        "rank_pattern": {"layers.0.self_attn.q_proj": 3},
    },
    "last": {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"]},
    "dora": {"use_dora": True},
    "saving": {"modules_to_save": ["lm_head"]},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
}
CLOSE = {"atol": 1e-6, "rtol": 1e-5}
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("frozen")
    folders.save_model(folder / "model")
    for seed, (name, settings) in enumerate(SETTINGS.items()):
        folders.save_adapter(folder / "model", folder / name, seed=seed, **settings)
    folders.save_adapter(folder / "model", folder / "changed")
    folders.edit_json(folder / "changed" / "adapter_config.json", init_lora_weights="pissa")
    return folder


def opened(folder, method, *, frozen, adapter=None, **options):
    section = ModelSection(
        path=str(folder / "model"),
        adapter=adapter and folder / adapter,
        frozen_adapters=tuple(folder / name for name in frozen),
    )
    options = NetworkOptions(method=method, is_trainable=method is not None, **options)
    return open_network(folder / "model", section, None, ALONE, options)


def merged(folder, names):
    """The base with adapters that PEFT has merged one after the other."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    for name in names:
        model = PeftModel.from_pretrained(model, folder / name).merge_and_unload()
    return model


@pytest.mark.parametrize(
    ("method", "names", "adapter"),
    [
        (LoRA(rank=4), ("one", "root"), None),
        (LoRA(rank=2, alpha=4.0, targets=("q_proj", "v_proj")), ("one",), "last"),
        pytest.param(
            LoRA(rank=4, init="pissa", targets=("k_proj", "q_proj")),
            ("root", "one"),
            None,
            marks=pytest.mark.proof,
        ),
        (LoRA(rank=4, rslora=True, modules_to_save=("lm_head",)), ("last",), None),
        pytest.param(
            LoRA(rank=4, targets=("embed_tokens", "q_proj")),
            ("last",),
            None,
            marks=pytest.mark.proof,
        ),
    ],
)
def test_a_run_starts_from_their_sum_and_saves_one_adapter(
    method, names, adapter, folder, tmp_path
):
    network = opened(folder, method, frozen=names, adapter=adapter)
    every = [*names, *([adapter] if adapter else [])]
    torch.testing.assert_close(logits(network.module), logits(merged(folder, every)), **CLOSE)
    frozen = {n: p.clone() for n, p in network.module.named_parameters() if ".frozen_" in n}
    now = logits(trained(network).module)
    assert frozen
    assert all(torch.equal(network.module.get_parameter(n), p) for n, p in frozen.items())
    base = AutoModelForCausalLM.from_pretrained(folder / "model")
    theirs = PeftModel.from_pretrained(base, saved(network, tmp_path / "adapter"))
    torch.testing.assert_close(logits(theirs), now, **CLOSE)


def test_without_training_all_of_them_are_computed(folder):
    for adapter in (None, "last"):
        network = opened(folder, None, frozen=("one", "root"), adapter=adapter)
        every = ["one", "root", *([adapter] if adapter else [])]
        torch.testing.assert_close(logits(network.module), logits(merged(folder, every)), **CLOSE)


def test_the_table_of_trained_weights_has_only_what_is_trained(folder):
    rows = table(opened(folder, LoRA(targets=("q_proj",)), frozen=("one",)).coverage)
    assert "self_attn: q_proj " in rows.replace("\n", " ")
    (line,) = (line for line in rows.splitlines() if "adapter" in line)
    assert line.split()[1] == "q_proj"


@pytest.mark.parametrize(
    ("method", "frozen", "words"),
    [
        (LoRA(), "dora", "an adapter with use_dora is no sum.*surefoot export"),
        (LoRA(), "saving", "an adapter with modules_to_save is no sum"),
        (LoRA(), "embedding", "embed_tokens, which is no linear layer"),
        (LoRA(dora=True), "one", r"has magnitudes \(method\.lora\.dora\)"),
        (LoRA(), "nowhere", "no adapter_config.json"),
        (LoRA(), "changed", "init_lora_weights pissa changed the base.*path_initial_model"),
    ],
)
def test_what_is_no_sum_is_refused(method, frozen, words, folder):
    with pytest.raises(ModelError, match=words):
        opened(folder, method, frozen=(frozen,))


def test_methods_of_the_weights_themselves_refuse_them(folder):
    data = {
        "model": {"path": str(folder / "model"), "frozen_adapters": [str(folder / "one")]},
        "data": {"datasets": ["sums"]},
        "stage": "sft",
        "train": {"output_dir": str(folder / "run"), "max_steps": 1},
    }
    with pytest.raises(RecipeError, match=r"model\.frozen_adapters: method full trains the wei"):
        read({**data, "method": "full"})
    found = read({**data, "method": "lora"}, base=folder).model.frozen_adapters
    assert found == (folder / "one",)
