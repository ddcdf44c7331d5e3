"""No run trains on positions that its model does not have; more of them go where the weights go."""

import json

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    FalconConfig,
    GPT2Config,
    GPT2LMHeadModel,
    MambaConfig,
)

import surefoot
from folders import edit_json, save_adapter, save_data, save_model, save_recipe, tokenizer
from surefoot.checkpoint.converting.targets import PEFTAdapter
from surefoot.data.training_data import prepare
from surefoot.errors import ModelError, RecipeError
from surefoot.model.config import num_positions
from surefoot.model.loading import resolve
from surefoot.parallel.section import ParallelSection
from surefoot.parallel.world import ALONE
from surefoot.recipe.recipe import load
from surefoot.recipe.recipe_data import encoding_of, open_codec, settled
from surefoot.use import export, open_model
from surefoot.use.exporting.conversion import convert
from surefoot.use.run_evaluation import evaluate_run
from zoo import architectures

IDS = torch.arange(60, 92).repeat(12)[None]  # 384 of them, where the model has 256 positions
LONG = [{"instruction": "say it", "output": "again and " * 30} for _ in range(8)]


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("positions")
    path = save_recipe(folder, data={"val_size": 2})
    save_data(folder / "data", rows=LONG)
    return path


def learned(folder):
    """A model whose positions are embeddings."""
    known = tokenizer()
    config = GPT2Config(vocab_size=len(known), n_positions=128, n_embd=32, n_layer=1, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(folder)
    known.save_pretrained(folder)
    return folder


def test_the_default_is_the_limit_of_the_model(project, tmp_path):
    recipe = load(project)
    assert settled(recipe, resolve(recipe.model)).data.cutoff_len == 256
    data = prepare(encoding_of(recipe, open_codec(recipe, resolve(recipe.model))))
    assert max(data.train.lengths) == 256
    save_model(tmp_path / "long", max_position_embeddings=1 << 15)
    assert settled(recipe, tmp_path / "long").data.cutoff_len == 2048
    edit_json(tmp_path / "long" / "config.json", max_position_embeddings="many")
    with pytest.raises(ModelError, match=r"config\.json: .*max_position_embeddings"):
        settled(recipe, tmp_path / "long")


@pytest.mark.parametrize("config", [BloomConfig(), MambaConfig(), FalconConfig(alibi=True)])
def test_a_model_without_positions_has_no_limit(config):
    assert num_positions(config) is None


@pytest.mark.parametrize("kind", ["rotary", "learned"])
def test_more_positions_than_the_model_has_are_refused_before_anything_is_written(
    project, tmp_path, kind
):
    model = learned(tmp_path / "gpt2") if kind == "learned" else project.parent / "model"
    overrides = {"model.path": str(model), "data.cutoff_len": 300}
    for act in (surefoot.train, lambda *a, **o: open_codec(load(*a, o), model)):
        with pytest.raises(RecipeError, match=r"data.cutoff_len: 300 is more than the") as error:
            act(project, **overrides)
        limit, cure = (128, False) if kind == "learned" else (256, True)
        assert f"{limit} positions" in str(error.value)
        key = "n_positions" if kind == "learned" else "max_position_embeddings"
        assert f"({key} in {model}/config.json)" in str(error.value)
        assert ("model.max_positions=300" in str(error.value)) is cure
    assert not (project.parent / "run").exists()


def test_a_model_with_learned_positions_trains_on_those_it_has(project, tmp_path):
    model = learned(tmp_path / "gpt2")
    settings = {"model.path": str(model), "train.output_dir": str(tmp_path / "run")}
    assert surefoot.train(project, **settings, **{"train.max_steps": 1}).global_step == 1
    assert load(tmp_path / "run/recipe.yaml").data.cutoff_len == 128


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"max_positions": 128}, "128 is less than the 256 positions"),
        ({"max_positions": 512, "path": "learned"}, "no rotary embeddings"),
        ({"max_positions": 512, "path": "scaled"}, "rescales them already"),
    ],
)
def test_what_cannot_be_extended_is_refused(project, tmp_path, settings, problem):
    learned(tmp_path / "learned")
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    save_model(tmp_path / "scaled", rope_parameters=rope)
    path = settings.get("path")
    told = {**settings, "path": str(tmp_path / path if path else project.parent / "model")}
    recipe = load(project, {"model": told})
    with pytest.raises(ModelError, match=problem):
        open_codec(recipe, resolve(recipe.model))


@torch.no_grad()
def logits(model):
    return model(IDS).logits


def extended(folder, kind, **changes):
    """What transformers itself makes of the weights in ``folder`` with longer positions."""
    scaled = {"rope_type": kind, "factor": 2.0, "rope_theta": 10000.0}
    scaled |= {"original_max_position_embeddings": 256} if kind != "linear" else {}
    scaled |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if kind == "llama3" else {}
    model = AutoModelForCausalLM.from_pretrained(
        folder, max_position_embeddings=512, rope_parameters=scaled, **changes
    )
    return model.eval()


@pytest.mark.parametrize(
    "kind", ["yarn", *(pytest.param(k, marks=pytest.mark.proof) for k in ("linear", "llama3"))]
)
def test_extended_positions_are_saved_with_a_full_model(project, tmp_path, kind):
    settings = {"model": {"max_positions": 512, "rope_scaling": kind}, "data.cutoff_len": 400}
    run = tmp_path / "run"
    state = surefoot.train(project, **settings, train={"output_dir": str(run), "max_steps": 2})
    assert state.global_step == 2
    saved = AutoModelForCausalLM.from_pretrained(run / "checkpoint-2").eval()
    assert saved.config.max_position_embeddings == 512
    reference = extended(project.parent / "model", kind)
    reference.load_state_dict(saved.state_dict())
    expected = logits(reference)
    assert torch.equal(logits(saved), expected)
    opened = open_model(run)
    assert torch.allclose(logits(opened.model), expected, atol=1e-6)
    reference = extended(project.parent / "model", "yarn" if kind == "linear" else "linear")
    reference.load_state_dict(saved.state_dict())
    assert not torch.allclose(logits(reference), expected, atol=1e-3)


def test_extended_positions_stay_with_an_adapter_wherever_it_goes(project, tmp_path):
    settings = {"model": {"max_positions": 512}, "data.cutoff_len": 400, "method": "lora"}
    run = tmp_path / "run"
    surefoot.train(project, **settings, train={"output_dir": str(run), "max_steps": 2})
    checkpoint, base = run / "checkpoint-2", project.parent / "model"
    reference = extended(base, "yarn")
    reference.load_adapter(str(checkpoint))
    expected = logits(reference)
    convert(checkpoint, tmp_path / "peft", PEFTAdapter())
    assert not (tmp_path / "peft/recipe.yaml").exists()
    for folder in (run, tmp_path / "peft"):
        assert torch.allclose(logits(open_model(folder).model), expected, atol=1e-5)
        merged = export(folder, tmp_path / f"merged of {folder.name}")
        assert json.loads((merged / "config.json").read_text())["max_position_embeddings"] == 512
        opened = AutoModelForCausalLM.from_pretrained(merged).eval()
        assert torch.allclose(logits(opened), expected, atol=1e-5)
    adopted = {"model": {"adapter": str(checkpoint)}, "method": "lora"}
    with pytest.raises(ModelError, match=r"set model.max_positions=512 model.rope_scaling=yarn"):
        surefoot.train(project, **adopted, train={"output_dir": str(tmp_path / "more")})
    recipe = load(run / "recipe.yaml")
    report = evaluate_run(recipe, ALONE, ParallelSection(), progress=no_bar)
    assert report.results[0].num_examples == 2


def no_bar(_title, _length):
    """Show nothing."""
    from contextlib import nullcontext

    return nullcontext(lambda _count: None)


def test_an_evaluation_of_a_model_with_fewer_positions_is_refused(project, tmp_path):
    short = save_model(tmp_path / "short", max_position_embeddings=64)
    recipe = load(project, {"data.cutoff_len": 200})
    with pytest.raises(RecipeError, match="200 is more than the 64 positions"):
        evaluate_run(recipe, ALONE, ParallelSection(), progress=no_bar, model=str(short))


def test_an_adapter_without_extended_positions_opens_as_ever(project, tmp_path):
    save_adapter(project.parent / "model", tmp_path / "adapter")
    assert open_model(tmp_path / "adapter").inner.config.max_position_embeddings == 256


def test_rows_that_transformers_computes_otherwise_with_padding_than_alone_are_refused(
    project, tmp_path
):
    model = architectures.build("doge", keep_window_size=12).double()
    generator = torch.Generator().manual_seed(1)

    def is_equal(length):
        rows = torch.randint(3, 64, (20, length), generator=generator)
        padding = torch.zeros(20, 8, dtype=torch.long)
        ids, mask = (torch.cat([one, padding], 1) for one in (rows, torch.ones_like(rows)))
        with torch.no_grad():
            alone = model(input_ids=rows, use_cache=False).logits
            padded = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        return torch.allclose(alone, padded[:, :length], atol=1e-9)

    assert is_equal(12)
    assert not is_equal(30)
    model.config.save_pretrained(tmp_path / "doge")
    recipe = load(project)
    assert settled(recipe, tmp_path / "doge").data.cutoff_len == 12
    with pytest.raises(RecipeError, match=r"cutoff_len: 13 is more than keep_window_size \(12\)"):
        settled(load(project, {"data.cutoff_len": 13}), tmp_path / "doge")
