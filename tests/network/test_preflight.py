"""What can be known is an error before any row is encoded or any weight is read."""

import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file, save_file

import ranks
import surefoot
from folders import save_adapter, save_recipe, save_tokenizer, tokenizer
from surefoot.errors import ModelError, RecipeError, RunError
from surefoot.methods import Full, LoRA
from surefoot.model.section import ModelSection
from surefoot.model.tokenizer import load_tokenizer
from surefoot.model.weight_matrices import refuse_read_weights
from surefoot.network.draft import MetaTensors, NetworkOptions
from surefoot.network.early import refuse_early, size_of_save
from surefoot.network.open import open_network
from surefoot.optim._variants.adamw import AdamW
from surefoot.parallel.section import ParallelSection
from surefoot.parallel.world import ALONE
from surefoot.recipe.recipe import load
from surefoot.recipe.recipe_data import SingleRankRecipe
from surefoot.run.assembly import build
from surefoot.use.bench import measure
from zoo import architectures

META = MetaTensors()


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    return save_recipe(tmp_path_factory.mktemp("early"))


def checked(project, tmp_path, *, method=None, num_processes=1, parallel=None, **section):
    recipe = load(project)
    refuse_early(
        project.parent / "model",
        replace(recipe.model, **section),
        NetworkOptions(method=method or Full(), parallel=ParallelSection(**(parallel or {}))),
        AdamW(learning_rate=1e-3),
        num_processes=num_processes,
        output_dir=tmp_path / "run",
    )


def test_what_fits_is_let_through(project, tmp_path):
    checked(project, tmp_path)
    checked(project, tmp_path, parallel={"tp": 2, "pp": 2}, method=LoRA(), attention="eager")
    assert not (tmp_path / "run").exists()


INTERLEAVED = {"pp": 2, "pp_schedule": "interleaved"}


@pytest.mark.parametrize(
    ("parallel", "words"),
    [
        ({"tp": 3}, r"parallel.tp: 3 ranks cannot share the 4 attention he"),
        (INTERLEAVED, r"parallel.pp: 4 pipeline stages need as many layers"),
    ],
)
def test_heads_or_layers_that_ranks_cannot_share_are_refused(project, tmp_path, parallel, words):
    with pytest.raises(RecipeError, match=words):
        checked(project, tmp_path, parallel=parallel)


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("lfm2", {}, r"its layers have a state, or tables of their own \(conv\)"),
        ("mamba2", {}, r"its layers have a state"),
        ("gptj", {}, r"its attention is by masks of rows"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            r"its rotary embedding \(dynamic\) depends on the length of the row",
        ),
    ],
)
def test_models_whose_rows_ranks_cannot_share_are_refused(kind, changes, words, tmp_path):
    architectures.build(kind, **changes).save_pretrained(tmp_path)
    save_tokenizer(tokenizer(), tmp_path)
    options = NetworkOptions(method=Full(), packing=True)
    others = (AdamW(learning_rate=1e-3),)
    keywords = {"num_processes": 2, "output_dir": tmp_path / "run"}
    refuse_early(tmp_path, ModelSection(path=str(tmp_path)), options, *others, **keywords)
    shared = replace(options, parallel=ParallelSection(dp_shard=2, cp=2))
    with pytest.raises(ModelError, match=rf"parallel\.cp: .* part of a row, because {words}"):
        refuse_early(tmp_path, ModelSection(path=str(tmp_path)), shared, *others, **keywords)


def test_a_weight_that_is_read_past_its_layer_is_refused():
    with pytest.raises(RecipeError, match=r"Gemma3nTextAltUp reads the weight of model.layers.0"):
        refuse_read_weights(architectures.build("gemma3n_text"))
    refuse_read_weights(architectures.build("llama"))


@pytest.fixture
def nothing_is_encoded(monkeypatch):
    monkeypatch.setattr("surefoot.run._data_loading.open_data", lambda *_: pytest.fail("encoded"))


@pytest.mark.parametrize("act", [build, lambda recipe: measure(SingleRankRecipe.of(recipe), 1)])
def test_building_and_benching_refuse_before_any_data_is_encoded(project, nothing_is_encoded, act):
    recipe = load(project, {"model.attention": "flash_attention_2"})
    with pytest.raises(ModelError, match="flash_attention_2 needs a GPU"):
        act(recipe)


def truncated(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def without_a_tensor(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("model.norm.weight")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def with_more_tokens(folder):
    tokenizer(extra=("<new>",)).save_pretrained(folder)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (truncated, r"model\.safetensors: (damaged or truncated|.* bytes)"),
        (without_a_tensor, r"1 tensor missing \(model\.norm\.weight\)"),
        (with_more_tokens, r"the tokenizer in .* has more tokens than the model has embeddings"),
    ],
)
def test_what_is_wrong_with_the_files_is_said_before_any_row_is_encoded(
    damage, words, project, tmp_path, nothing_is_encoded
):
    shutil.copytree(project.parent / "model", tmp_path / "model")
    damage(tmp_path / "model")
    more = {"model.path": str(tmp_path / "model"), "train.output_dir": str(tmp_path / "run")}
    with pytest.raises((ModelError, RecipeError), match=words):
        surefoot.train(project, method="lora", **more)


def test_the_files_of_a_reference_and_of_an_adapter_are_looked_at_too(
    project, tmp_path, nothing_is_encoded
):
    base = project.parent / "model"
    shutil.copytree(base, tmp_path / "reference")
    truncated(tmp_path / "reference")
    more = {"train.output_dir": str(tmp_path / "run")}
    with pytest.raises(ModelError, match=r"reference/model\.safetensors: "):
        surefoot.train(project, stage={"dpo": {"reference": str(tmp_path / "reference")}}, **more)
    save_adapter(base, tmp_path / "adapter")
    path = tmp_path / "adapter/adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"adapter_model\.safetensors: damaged or truncated"):
        surefoot.train(project, method="lora", model={"adapter": str(tmp_path / "adapter")}, **more)


def test_every_rank_is_told_what_is_refused(project):
    def work(world):
        with pytest.raises(ModelError, match="flash_attention_2 needs a GPU"):
            build(load(project, {"model.attention": "flash_attention_2"}), world=world)

    ranks.run(2, work)


def test_attention_that_the_device_lacks_is_refused(project, tmp_path):
    with pytest.raises(ModelError, match=r"model.attention: flash_attention_2 needs"):
        checked(project, tmp_path, attention="flash_attention_2")


@pytest.mark.parametrize("is_named", [True, False], ids=["in the recipe", "in the tokenizer"])
def test_tokens_whose_embeddings_would_not_be_trained_are_refused_with_a_cure(project, is_named):
    base = project.parent / "model"
    section = replace(load(project).model, new_special_tokens=("<new>",) if is_named else ())
    tokens = load_tokenizer(base, new_special_tokens=("<new>",))
    who = "model.new_special_tokens: " if is_named else "the tokenizer in .* has more tokens than"
    with pytest.raises(RecipeError, match=rf"{who}.*never be trained; set method.lora.new_to"):
        open_network(base, section, tokens, ALONE, NetworkOptions(method=LoRA()), META)
    named = LoRA(modules_to_save=("embed_tokens", "lm_head"))
    for method in (LoRA(new_tokens=True), named, Full()):  # what it advises
        open_network(base, section, tokens, ALONE, NetworkOptions(method=method), META)


def test_a_missing_package_is_refused(project, tmp_path, monkeypatch):
    monkeypatch.setattr("surefoot.model.config.find_spec", lambda _: None)
    with pytest.raises(ModelError, match="needs bitsandbytes, which is not installed"):
        checked(project, tmp_path, quantization_bit=4, method=LoRA())
    monkeypatch.setattr("surefoot.network.early.find_spec", lambda _: None)
    with pytest.raises(RecipeError, match=r"train.report_to: tensorboard needs tensorboard"):
        surefoot.train(project, train={"report_to": "tensorboard"})


def test_the_size_of_a_checkpoint_is_what_it_will_take(project, tmp_path):
    for method in ("full", "lora"):
        run, short = tmp_path / method, {"max_steps": 1, "eval_steps": None}
        surefoot.train(project, method=method, train={"output_dir": str(run), **short})
        files = ["model", "adapter_model", "optimizer"]
        paths = [run / "checkpoint-1" / f"{name}.safetensors" for name in files]
        taken = sum(path.stat().st_size for path in paths if path.exists())
        options = NetworkOptions(method={"full": Full(), "lora": LoRA()}[method])
        section = load(project).model
        network = open_network(project.parent / "model", section, None, ALONE, options, META)
        assert 0.8 * taken < size_of_save(network, AdamW(learning_rate=1e-3)) <= taken


def test_nothing_is_encoded_or_written_if_the_disk_or_a_target_is_wrong(
    project, tmp_path, monkeypatch
):
    cache = tmp_path / "cache"
    more = {"data.cache_dir": str(cache), "train.output_dir": str(tmp_path / "run")}
    with pytest.raises(RecipeError, match=r"method.lora.targets: .*'nope'"):
        surefoot.train(project, **more, method={"lora": {"targets": ["nope"]}})
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(RunError, match=r"one checkpoint takes .* MiB, and the disk of"):
        surefoot.train(project, **more)
    assert not cache.exists()
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names <= {".lock", ".heartbeat.json", "launches.jsonl"}
