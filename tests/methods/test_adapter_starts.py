"""Initial values that are computed from the weights: the model is the base at first, and what is
saved is an ordinary adapter of the unchanged base."""

from importlib.util import find_spec

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

import folders
import tiny
from adapted import gpt2, logits, saved, trained
from each import some
from surefoot.errors import RecipeError
from surefoot.methods import LoRA
from surefoot.model.adapters import factors_of, principal, stacked_layers
from surefoot.model.section import ModelSection
from surefoot.network.draft import NetworkOptions
from surefoot.network.open import open_network
from surefoot.parallel.world import ALONE
from surefoot.recipe.recipe import read

CASES = {
    "pissa": {"init": "pissa"},
    "exact": {"init": "pissa", "init_iterations": 0, "alpha": 3.0},
    "olora": {"init": "olora", "rslora": True},
    "patterns": {
        "init": "pissa",
        "rslora": True,
        "rank_pattern": {"q_proj": 2, "layers.1.*": 5},
        "alpha_pattern": {"v_proj": 3.0},
        "modules_to_save": ("lm_head",),
    },
    "frozen a": {"init": "pissa", "freeze_a": True, "dropout": 0.1},
    "some layers": {"init": "olora", "layers": (-1,), "targets": ("up_proj",)},
    "transposed": {"init": "pissa"},
}
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:fan_in_fan_out")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return folders.save_model(tmp_path_factory.mktemp("starts"))


def opened(folder, method, **section):
    section = ModelSection(path=str(folder), **section)
    return open_network(folder, section, None, ALONE, NetworkOptions(method=method))


@pytest.mark.parametrize("case", some(CASES, ["pissa", "patterns", "transposed", "frozen a"]))
def test_it_starts_as_the_base_and_opens_in_peft_as_it_was_trained(case, folder, tmp_path):
    folder = gpt2(tmp_path / "gpt2") if case == "transposed" else folder
    base = AutoModelForCausalLM.from_pretrained(folder)
    network = opened(folder, LoRA(rank=4, **CASES[case]))
    torch.testing.assert_close(logits(network.module), logits(base), atol=1e-6, rtol=1e-5)
    now = logits(trained(network).module)
    assert (now - logits(base)).abs().max() > 0.01
    theirs = PeftModel.from_pretrained(base, saved(network, tmp_path / "adapter"))
    torch.testing.assert_close(logits(theirs), now, atol=1e-6, rtol=1e-5)


def test_a_frozen_a_is_saved_and_never_changes(folder):
    network = opened(folder, LoRA(rank=4, freeze_a=True, targets=("q_proj",)))
    before = {n: t.clone() for n, t in network.weights.state_dict().items()}
    after = trained(network).weights.state_dict()
    assert {n.rpartition(".lora_")[2] for n in network.named} == {"B.weight"}
    assert {n for n, t in after.items() if torch.equal(t, before[n])} == {
        n for n in after if "lora_A" in n
    }


def test_the_values_are_those_of_peft(folder):
    for init, iterations in (("pissa", 0), ("pissa", 16), ("olora", 16)):
        method = LoRA(rank=4, init=init, init_iterations=iterations)
        network = opened(folder, method)
        config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=init)
        theirs = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config)
        for found in stacked_layers(network.module):
            other = theirs.get_submodule(found.name)
            ours = found.layer.get_delta_weight("default")
            torch.testing.assert_close(ours, other.get_delta_weight("default"), atol=1e-5, rtol=0)
            residual = found.layer.get_base_layer().weight - ours
            torch.testing.assert_close(residual, other.base_layer.weight, atol=1e-5, rtol=0)


def test_the_randomized_factors_are_the_best_approximation():
    """Eckart and Young, in float64; the values decay as those of trained weights do."""
    torch.manual_seed(0)
    u, v = (torch.linalg.qr(torch.randn(n, 60, dtype=torch.float64)).Q for n in (96, 80))
    s = 1.0 / torch.arange(1, 61, dtype=torch.float64)
    weight = u * s @ v.T
    found = principal(weight, 6, 0.5, iterations=16, seed=3)
    best = u[:, :6] * s[:6] @ v[:, :6].T
    torch.testing.assert_close(0.5 * found.b @ found.a, best, atol=1e-6, rtol=0)
    assert torch.allclose(found.a.norm(dim=1), found.b.norm(dim=0)), "the root is in both"


def test_factors_depend_on_the_weight_and_the_seed_alone():
    weight = torch.randn(40, 30)
    once = factors_of("pissa", weight, 4, 2.0, iterations=2, seed=5)
    torch.manual_seed(9)
    again = factors_of("pissa", weight.T.contiguous().T, 4, 2.0, iterations=2, seed=5)
    assert torch.equal(once.a, again.a)
    assert torch.equal(once.b, again.b)


def test_an_adapter_in_bfloat16_starts_as_its_base(tmp_path):
    """PEFT rounds what is left of the base, so that it starts as another model."""
    folder = folders.save_model(tmp_path / "model", dtype=torch.bfloat16)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).float()
    network = opened(folder, LoRA(rank=4, init="pissa"), dtype="bfloat16")
    for found in stacked_layers(network.module):
        assert torch.equal(
            found.layer.get_base_layer().weight.float(),
            base.get_submodule(found.name.removeprefix("base_model.model.")).weight,
        )


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("method", [LoRA(rank=4, init="pissa"), LoRA(rank=4, dora=True)], ids=str)
def test_a_quantized_base_stays_as_it_is(bits, method, folder):
    plain = opened(folder, LoRA(rank=4), quantization_bit=bits)
    network = opened(folder, method, quantization_bit=bits)
    close = {"atol": 1e-5, "rtol": 1e-5}
    torch.testing.assert_close(logits(network.module), logits(plain.module), **close)
    assert torch.isfinite(logits(trained(network, 1).module)).all()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"rank": 20, "init": "pissa"},
            r"lora\.rank: .* at most rank .*, of which init: pissa can",
        ),
        ({"init": "olora", "targets": ("embed_tokens",)}, r"lora\.init: .*embed_tokens is no line"),
        ({"freeze_a": True, "targets": ("embed_tokens",)}, r"lora\.freeze_a: .* is no linear"),
    ],
)
def test_what_has_no_such_start_is_refused(settings, words):
    with pytest.raises(RecipeError, match=words):
        LoRA(**settings).apply(tiny.model())


def test_experts_are_refused():
    with pytest.raises(RecipeError, match=r"lora\.init: PEFT has none for .*experts"):
        LoRA(init="pissa").apply(tiny.model("mixtral"))


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        ({"init": "pissa", "dora": True}, "init is pissa, which dora cannot have"),
        ({"init": "eva"}, "expected one of kaiming, gaussian, pissa, olora"),
        ({"init": "gaussian"}, r"method\.lora\.init: has no effect on model\.adapter"),
        ({"init_iterations": -1}, "init_iterations: must not be negative"),
    ],
)
def test_settings_that_contradict_are_refused_in_a_sentence(folder, tmp_path, lora, words):
    folders.save_adapter(folder, tmp_path / "adapter")
    data = {
        "model": {"path": str(folder), "adapter": str(tmp_path / "adapter")},
        "data": {"datasets": ["sums"]},
        "stage": "sft",
        "method": {"lora": lora},
        "train": {"output_dir": str(tmp_path / "run"), "max_steps": 1},
    }
    with pytest.raises(RecipeError, match=words):
        read(data)
