"""What a path means: whatever somebody points at, the right weights, or why there are none."""

import shutil

import pytest
import torch

import surefoot
from folders import edit_json, save_adapter, save_model, save_recipe
from surefoot.checkpoint.converting.targets import HuggingFaceModel, SurefootCheckpoint
from surefoot.checkpoint.verification import verify
from surefoot.errors import CheckpointError, ModelError, SurefootError
from surefoot.parallel.sharding import Mesh
from surefoot.use import export, locate, open_model
from surefoot.use.exporting.conversion import convert


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A finished LoRA run with checkpoints 2 and 4."""
    folder = tmp_path_factory.mktemp("project")
    recipe = save_recipe(folder, method={"lora": {"rank": 2}}, generate={"max_new_tokens": 7})
    surefoot.train(recipe)
    return folder


@pytest.fixture
def run(project, tmp_path):
    """A copy of the run, to be damaged."""
    return shutil.copytree(project / "run", tmp_path / "run")


def test_a_run_is_its_newest_checkpoint(project):
    found = locate(project / "run")
    assert found.folder == project / "run" / "checkpoint-4"
    assert found.is_adapter
    assert found.recipe.generate.max_new_tokens == 7


def test_a_recipe_is_its_run(project):
    assert locate(project / "recipe.yaml") == locate(str(project / "run"))


def test_a_checkpoint_is_itself(project):
    assert locate(project / "run" / "checkpoint-2").folder.name == "checkpoint-2"


def test_a_run_that_ends_with_its_best_is_its_best(tmp_path):
    worst_is_best = {"greater_is_better": True, "load_best_model_at_end": True, "max_steps": 6}
    state = surefoot.train(save_recipe(tmp_path, train=worst_is_best))
    assert state.best_global_step == 2
    assert locate(tmp_path / "run").folder.name == "checkpoint-2"
    shutil.rmtree(tmp_path / "run" / "checkpoint-2")
    assert locate(tmp_path / "run").folder.name == "checkpoint-6"


def test_a_damaged_newest_checkpoint_is_passed_over(run):
    (run / "checkpoint-4" / "tokenizer.json").write_text("{}")
    assert locate(run).folder.name == "checkpoint-2"


def test_a_damaged_checkpoint_that_is_asked_for_is_refused(run):
    path = run / "checkpoint-4" / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors.*bytes"):
        locate(run / "checkpoint-4")


def test_a_run_without_a_whole_checkpoint_is_refused(run):
    for checkpoint in run.glob("checkpoint-*"):
        (checkpoint / "manifest.json").unlink()
        (checkpoint / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="none of its checkpoints is valid"):
        locate(run)


def test_a_run_before_its_first_checkpoint_says_so(project, tmp_path):
    (tmp_path / "run").mkdir()
    shutil.copy(project / "run" / "recipe.yaml", tmp_path / "run")
    with pytest.raises(CheckpointError, match="no checkpoint yet"):
        locate(tmp_path / "run")
    recipe = save_recipe(tmp_path)
    with pytest.raises(CheckpointError, match=r"surefoot train .*recipe\.yaml"):
        locate(recipe)


def test_a_recipe_that_no_longer_reads_does_not_hide_the_weights(tmp_path):
    save_model(tmp_path / "model")
    (tmp_path / "model" / "recipe.yaml").write_text("nonsense: 1")
    found = locate(tmp_path / "model")
    assert found.folder == tmp_path / "model"
    assert found.recipe is None


def test_plain_folders_are_models_or_adapters(tmp_path):
    save_model(tmp_path / "base")
    save_adapter(tmp_path / "base", tmp_path / "adapter")
    assert not locate(tmp_path / "base").is_adapter
    assert locate(tmp_path / "adapter").is_adapter


@pytest.fixture(scope="module")
def merged(tmp_path_factory):
    """A model, an adapter of it, and both in one folder, as after a merge."""
    folder = tmp_path_factory.mktemp("merged")
    save_model(folder / "base")
    save_adapter(folder / "base", folder / "adapter")
    shutil.copytree(export(folder / "adapter", folder / "merged"), folder / "left")
    for path in (folder / "adapter").glob("adapter_*"):
        shutil.copy(path, folder / "left")
    return folder


def train_with(folder, **model):
    method = {"lora": {"rank": 4}} if "adapter" in model else "full"
    recipe = save_recipe(folder, model=model, method=method)
    surefoot.train(recipe, **{"train.max_steps": 1})


READERS = {
    "chat": lambda left, new: open_model(left),
    "chat --adapter": lambda left, new: open_model(left.parent / "base", adapter=left),
    "export": lambda left, new: export(left, new / "out"),
    "export --base": lambda left, new: export(
        left.parent / "adapter", new / "out", HuggingFaceModel(base=str(left))
    ),
    "to huggingface": lambda left, new: convert(left, new / "out", HuggingFaceModel()),
    "to surefoot": lambda left, new: convert(left, new / "out", SurefootCheckpoint()),
    "train": lambda left, new: train_with(new, path=str(left)),
    "continued": lambda left, new: train_with(
        new, path=str(left.parent / "base"), adapter=str(left)
    ),
    "verify": lambda left, new: expect_ok(verify(left)),
}


def expect_ok(report):
    if report.problems:
        raise CheckpointError(report.problems[0])


@pytest.mark.parametrize("left_over", ["config and weights", "config"])
@pytest.mark.parametrize("reader", READERS)
def test_a_merged_model_with_its_adapter_is_refused_by_every_reader(
    merged, tmp_path, reader, left_over
):
    left = tmp_path / "both" / "left"
    shutil.copytree(merged / "left", left)
    for name in ("base", "adapter"):
        (left.parent / name).symlink_to(merged / name)
    if left_over == "config":
        (left / "adapter_model.safetensors").unlink()
    (tmp_path / "new").mkdir()
    with pytest.raises(
        SurefootError, match=r"left: contains a model .*delete adapter_config\.json"
    ):
        READERS[reader](left, tmp_path / "new")
    assert not (tmp_path / "new" / "out").exists()


def test_the_named_cure_makes_it_the_merged_model(merged, tmp_path):
    shutil.copytree(merged / "left", tmp_path / "left")
    (tmp_path / "left" / "adapter_config.json").unlink()
    assert not locate(tmp_path / "left").is_adapter  # weights of an adapter alone mean nothing
    (tmp_path / "left" / "adapter_model.safetensors").unlink()
    ids = torch.arange(60, 80)[None]
    found, expected = (open_model(f).model(ids) for f in (tmp_path / "left", merged / "merged"))
    assert torch.equal(found.logits, expected.logits)


def test_a_base_that_is_an_adapter_is_refused(merged, tmp_path):
    shutil.copytree(merged / "adapter", tmp_path / "second")
    edit_json(
        tmp_path / "second" / "adapter_config.json",
        base_model_name_or_path=str(merged / "adapter"),
    )
    with pytest.raises(ModelError, match=r"its base .* is an adapter, too; merge that first"):
        open_model(tmp_path / "second")
    edit_json(
        tmp_path / "second" / "adapter_config.json", base_model_name_or_path=str(merged / "left")
    )
    with pytest.raises(ModelError, match="left: contains a model"):
        open_model(tmp_path / "second")


def test_a_sharded_checkpoint_with_an_adapter_in_it_is_refused(tmp_path):
    surefoot.train(save_recipe(tmp_path), **{"train.max_steps": 1})
    convert(
        tmp_path / "run" / "checkpoint-1", tmp_path / "sharded", SurefootCheckpoint(mesh=Mesh(2))
    )
    assert not locate(tmp_path / "sharded").is_adapter
    save_adapter(tmp_path / "model", tmp_path / "adapter")
    shutil.copy(tmp_path / "adapter" / "adapter_config.json", tmp_path / "sharded")
    with pytest.raises(ModelError, match=r"sharded: contains a model .rank_00000"):
        locate(tmp_path / "sharded")


def test_folders_with_checkpoints_of_others_work_too(tmp_path):
    for step in (5, 10):
        save_model(tmp_path / "outputs" / f"checkpoint-{step}")
    assert locate(tmp_path / "outputs").folder.name == "checkpoint-10"


def test_a_pickle_is_refused_with_the_command_that_converts_it(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(SurefootError, match=r"pytorch_model\.bin.*run code(.|\n)*python -c"):
        locate(tmp_path)


def test_what_is_not_there_is_said_plainly(tmp_path):
    with pytest.raises(ModelError, match="no folder"):
        locate(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"^no folder 'no/such-model', and the"):
        locate("no/such-model")
    with pytest.raises(SurefootError, match="contains no weights"):
        locate(tmp_path)


def test_a_weight_file_is_not_a_folder(tmp_path):
    save_model(tmp_path / "base")
    with pytest.raises(ModelError, match="is a file; expected its folder"):
        locate(tmp_path / "base" / "model.safetensors")


@pytest.mark.parametrize("name", ["ok.jsonl", "ok.csv", "OK.JSON"])
def test_a_file_of_rows_is_named_as_one(name, tmp_path):
    (tmp_path / name).write_text("{}")
    with pytest.raises(ModelError, match=rf"is a file of rows; .*predict MODEL --prompts .*{name}"):
        locate(tmp_path / name)


def test_a_folder_with_broken_json_is_refused(tmp_path):
    save_model(tmp_path / "base")
    (tmp_path / "base" / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        locate(tmp_path / "base")
