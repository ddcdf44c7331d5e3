"""LLaMA Pro: new layers change nothing at first, only they are trained, and transformers opens the
deeper model."""

from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import tiny
from project import Project, assert_same, checkpoints, final_weights
from surefoot.errors import RecipeError
from surefoot.methods import LLaMAPro
from surefoot.model.expansion import verify_new_layers
from surefoot.model.section import ModelSection
from surefoot.network.draft import MetaTensors, NetworkOptions
from surefoot.network.open import open_network
from surefoot.parallel.world import ALONE
from surefoot.plugins.trainers.to_trainer import save_trainer_checkpoint
from surefoot.recipe.recipe import load
from surefoot.run.assembly import build
from zoo import architectures

IDS = torch.arange(3, 15)[None]
NORMED = "normalize what a branch adds"
UNDESCRIBED = "its configuration cannot describe them|its configuration allows no more"
OTHERWISE = "does not return its input|no output projection is known"
REFUSED = {
    **dict.fromkeys(("exaone4", "flex_olmo", "gemma2", "gemma3_text", "glm4"), NORMED),
    **dict.fromkeys(("hyperclovax", "olmo2", "olmo3"), NORMED),
    # kinds of layers by their number, here one of a copy of layer 0
    **dict.fromkeys(("afmoe", "bamba", "deepseek_v2", "deepseek_v3", "diffllama"), UNDESCRIBED),
    **dict.fromkeys(("dots1", "ernie4_5_moe", "gemma3n_text", "glm4_moe", "jamba"), UNDESCRIBED),
    **dict.fromkeys(("lfm2_moe", "llama4_text", "minicpm3", "minimax", "zamba2"), UNDESCRIBED),
    **dict.fromkeys(("ctrl", "doge", "doge:window", "jetmoe"), OTHERWISE),
    **dict.fromkeys(("modernbert-decoder", "rwkv", "openai-gpt"), OTHERWISE),
    "longcat_flash": "expected at most 1",
}
FEW = ("llama:bias", "qwen2", "mixtral", "gpt2", "gpt_neox", "ministral", "gemma2", "gpt_oss")
KINDS = [
    kind if kind in FEW else pytest.param(kind, marks=pytest.mark.proof)
    for kind in architectures.SETTINGS
]


def logits_of(model, batch):
    return model(input_ids=batch.input_ids, use_cache=False).logits


@pytest.mark.parametrize("kind", KINDS)
def test_an_architecture_computes_the_same_with_new_layers_or_is_refused(kind, tmp_path):
    model = architectures.build(kind)
    with torch.no_grad():
        expected = model(input_ids=IDS, use_cache=False).logits
    depth = model.config.get_text_config().num_hidden_layers
    if kind not in REFUSED:
        model.save_pretrained(tmp_path / "base")

    def grow():
        LLaMAPro(num_new_layers=2).apply(model)
        verify_new_layers(model, partial(logits_of, model), is_packed=False)

    if kind in REFUSED:
        with pytest.raises(RecipeError, match=f"llama_pro.*({REFUSED[kind]})"):
            grow()
        return
    grow()
    assert torch.equal(model(input_ids=IDS, use_cache=False).logits, expected)
    model.save_pretrained(tmp_path / "deeper")
    base, deeper = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("base", "deeper")
    )
    assert deeper.config.get_text_config().num_hidden_layers == depth + 2
    plain, found = (one(input_ids=IDS, use_cache=False).logits for one in (base, deeper))
    # equal but for how experts in other places of memory are rounded
    assert (found - plain).abs().max() <= 1e-6 * plain.abs().max()
    model(input_ids=IDS, labels=IDS).loss.backward()
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert all(p.grad is not None and p.grad.isfinite().all() for p in trained.values())
    assert any(p.grad.any() for p in trained.values()), "the branches learn"


def test_new_layers_are_spread_evenly_and_alone_are_trained():
    model = LLaMAPro(num_new_layers=2).apply(tiny.model(num_hidden_layers=5))
    trained = {name.split(".")[2] for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {"2", "6"}  # copies of layers 1 and 4
    state = model.state_dict()
    for copy, of in (("2", "1"), ("6", "5")):
        for name in (n for n in state if n.startswith(f"model.layers.{copy}.")):
            is_last = "o_proj" in name or "down_proj" in name
            other = state[name.replace(f"layers.{copy}.", f"layers.{of}.")]
            assert torch.equal(state[name], torch.zeros_like(other) if is_last else other), name
    assert [layer.self_attn.layer_idx for layer in model.model.layers] == list(range(7))


def test_it_generates_with_a_key_value_cache_of_all_layers():
    plain = tiny.model("mistral")
    expected = plain.generate(IDS, max_new_tokens=8, do_sample=False)
    deeper = LLaMAPro(num_new_layers=3).apply(tiny.model("mistral"))
    assert torch.equal(deeper.generate(IDS, max_new_tokens=8, do_sample=False), expected)


def test_more_layers_than_there_are_to_copy_are_refused():
    with pytest.raises(RecipeError, match=r"num_new_layers: expected at most 3, .* got 4"):
        LLaMAPro(num_new_layers=4).apply(tiny.model())
    with pytest.raises(ValueError, match="num_new_layers must be at least 1, got 0"):
        LLaMAPro(num_new_layers=0)


def test_an_architecture_whose_layers_depend_on_their_number_is_refused():
    model = architectures.build("gpt2", scale_attn_by_inverse_layer_idx=True)
    with pytest.raises(RecipeError, match=r"attn\.scaling of layer 1 is .*, but would be .* when"):
        LLaMAPro(num_new_layers=2).apply(model)
    model = tiny.model()
    for layer in model.model.layers:  # as its code might
        layer.self_attn.register_forward_hook(lambda m, _, out: (out[0] / (m.layer_idx + 1), None))
    LLaMAPro(num_new_layers=2).apply(model)
    with pytest.raises(RecipeError, match="compute differently under another number"):
        verify_new_layers(model, partial(logits_of, model), is_packed=False)


def test_layers_that_the_configuration_places_by_number_are_refused():
    model = architectures.build("qwen3_moe", mlp_only_layers=[0])
    with pytest.raises(RecipeError, match="its configuration cannot describe them: "):
        LLaMAPro(num_new_layers=2).apply(model)


def test_a_model_without_values_has_the_new_layers(tmp_path):
    project = Project(tmp_path)
    options = NetworkOptions(method=LLaMAPro(num_new_layers=1))
    section = ModelSection(path=str(tmp_path / "model"))
    network = open_network(tmp_path / "model", section, None, ALONE, options, MetaTensors())
    layer = sum(p.numel() for p in tiny.model().model.layers[0].parameters())
    assert network.num_trainable == layer
    assert len(network.inner.model.layers) == 4
    assert project.recipe.exists()


def test_what_a_run_saves_opens_in_transformers_and_is_trained_on(tmp_path):
    project = Project(tmp_path, method={"llama_pro": {"num_new_layers": 2}}, train={"max_steps": 4})
    build(load(project.recipe)).fit()
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    deeper = AutoModelForCausalLM.from_pretrained(checkpoints(project.run)[-1])
    assert deeper.config.num_hidden_layers == 5
    for place, source in ((0, 0), (2, 1), (3, 2)):  # new ones are 1 and 4
        for name, value in base.model.layers[source].state_dict().items():
            assert torch.equal(deeper.model.layers[place].state_dict()[name], value), name
    assert not torch.equal(deeper(input_ids=IDS).logits, base(input_ids=IDS).logits)
    again = f"model.path={checkpoints(project.run)[-1]}"
    other = f"train.output_dir={tmp_path / 'again'}"
    more = build(load(project.recipe, [again, other])).policy.network
    assert {name.split(".")[2] for name in more.trainable} == {"1", "4"}, "the same layers"
    assert len(more.inner.model.layers) == 5
    with pytest.raises(RecipeError, match=r"got 1, but the model has 2 layers of an earlier run"):
        build(load(project.recipe, [again, other, "method.llama_pro.num_new_layers=1"]))
    newest = checkpoints(project.run)[-1]
    save_trainer_checkpoint(newest, tmp_path / "trainer", run=load(project.recipe))
    assert_same(final_weights(project.run), load_file(tmp_path / "trainer/model.safetensors"))

    for new in (1, 4):
        deeper.model.layers[new].self_attn.o_proj.weight.data.zero_()
        deeper.model.layers[new].mlp.down_proj.weight.data.zero_()
    assert torch.equal(deeper(input_ids=IDS).logits, base(input_ids=IDS).logits)
