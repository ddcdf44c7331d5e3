"""What a user can get wrong: a clear error, exit code 2, no traceback, and nothing is lost."""

import json
import os

import pytest
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import surefoot
import tiny
from project import Project, put_back
from surefoot.cli.main import main
from surefoot.errors import CheckpointError
from surefoot.training import TrainerCallback


def train(project, *overrides):
    """Exit code and message of ``surefoot train`` in this process."""
    result = CliRunner().invoke(main, ["train", str(project.recipe), *overrides])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stderr


def files(folder):
    return {p.relative_to(folder): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def edit(**sections):
    """A mistake in the recipe."""

    def make(project):
        for name, fields in sections.items():
            project.sections[name] = (
                fields if isinstance(fields, str) else {**project.sections.get(name, {}), **fields}
            )
        project.write()

    return make


def write(name, text):
    """A mistake in a file."""
    return lambda project: (project.folder / name).write_text(text)


def truncate(project):
    path = project.folder / "model" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def pickled(project):
    path = project.folder / "model" / "model.safetensors"
    path.rename(path.with_name("pytorch_model.bin"))


def adapter_of_another_model(project):
    from surefoot.checkpoint.saving.preparation import save
    from surefoot.methods import LoRA
    from surefoot.model.weights import AdapterWeights, adapter_files

    other = LoRA(rank=2).apply(tiny.model("llama", hidden_size=16, head_dim=4))
    companions = adapter_files(other)
    made = save(
        project.folder, 1, {"model": AdapterWeights(other)}, kind="adapter", companions=companions
    )
    edit(method="lora", model={"adapter": str(made)})(project)


UNMASKABLE = "{% for m in messages %}{{ m.content | upper }}{{ loop.length }}{% endfor %}"


def template_that_cannot_be_masked(project):
    (project.folder / "model" / "chat_template.jinja").write_text(UNMASKABLE)


MISTAKES = {
    "unknown key": (
        edit(optim={"adamw": {"learning_rat": 1e-3}}),
        ["optim.adamw.learning_rat", "learning_rate"],
    ),
    "wrong type": (edit(train={"max_steps": "many"}), ["train.max_steps", "many"]),
    "bad YAML": (write("recipe.yaml", "model: [\n"), ["recipe.yaml:"]),
    "missing model": (edit(model={"path": "nowhere"}), ["model.path", "nowhere"]),
    "missing dataset": (edit(data={"datasets": ["summs"]}), ["summs", "sums"]),
    "missing file": (
        write("data/dataset_info.json", '{"sums": {"file_name": "no.jsonl"}}'),
        ["no.jsonl"],
    ),
    "empty dataset": (write("data/sums.jsonl", ""), ["sums", "no rows"]),
    "absent column": (
        write(
            "data/dataset_info.json",
            json.dumps({"sums": {"file_name": "sums.jsonl", "columns": {"response": "answer"}}}),
        ),
        ["answer", "output"],
    ),
    "broken rows": (write("data/sums.jsonl", "{nonsense\n" * 20), ["sums", "row"]),
    "cutoff too small": (edit(data={"cutoff_len": 4}), ["cutoff_len"]),
    "template that cannot be masked": (template_that_cannot_be_masked, ["template"]),
    "unknown template": (edit(data={"template": "lama3"}), ["lama3", "llama3"]),
    "unknown target": (edit(method={"lora": {"targets": ["q_prj"]}}), ["q_prj", "q_proj"]),
    "truncated weights": (truncate, ["model", "truncated"]),
    "pickled weights": (pickled, ["pytorch_model.bin", "save_pretrained"]),
    "adapter of another model": (adapter_of_another_model, ["another model"]),
    "missing checkpoint": (edit(checkpoint={"resume": "runs/no/checkpoint-3"}), ["checkpoint-3"]),
    "evaluation without data": (edit(train={"eval_steps": 2}), ["train.eval_steps", "val_size"]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_and_nothing_is_trained(mistake, tmp_path):
    project = Project(tmp_path)
    make, words = MISTAKES[mistake]
    make(project)
    code, message = train(project)
    assert code == 2, message
    assert "Traceback" not in message
    for word in words:
        assert word in message
    assert not list(tmp_path.glob("run/checkpoint-*"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    project = Project(tmp_path_factory.mktemp("finished"), train={"max_steps": 3})
    assert train(project)[0] == 0
    return project


@pytest.fixture
def trained(finished, tmp_path):
    with put_back(finished, tmp_path / "before") as project:
        yield project


CHANGES = {
    "another learning rate": (
        edit(optim={"adamw": {"learning_rate": 1.0}}),
        "optim.adamw.learning_rate",
    ),
    "another method": (edit(method="lora"), "method"),
    "another seed": (edit(train={"seed": 1}), "train.seed"),
    "resume none": (edit(checkpoint={"resume": "none"}), "checkpoint.resume"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_an_output_dir_that_holds_another_run_is_left_alone(change, trained):
    make, word = CHANGES[change]
    before = files(trained.run)
    make(trained)
    code, message = train(trained, "train.max_steps=6")
    assert (code, word in message) == (2, True), message
    assert files(trained.run) == before


def test_a_run_gone_on_from_elsewhere_is_still_one_run(trained, tmp_path):
    """With ``resume=PATH`` the first start takes PATH; later ones go on, with the same recipe."""
    start = f"checkpoint.resume={trained.run / 'checkpoint-3'}"
    elsewhere = [f"train.output_dir={tmp_path / 'elsewhere'}", "train.max_steps=6", start]
    assert train(trained, *elsewhere)[0] == 0
    code, message = train(trained, *elsewhere, "optim.adamw.learning_rate=0.5")
    assert (code, "contains a run with other settings" in message) == (2, True), message


def test_a_run_whose_last_save_fails_does_not_call_itself_done(tmp_path):
    project = Project(tmp_path, train={"max_steps": 4}, checkpoint={"on_save_error": "continue"})

    class InTheWay(TrainerCallback):
        def on_train_begin(self, args, state, control):
            (args.output_dir / "checkpoint-4").mkdir()

    with pytest.raises(CheckpointError, match=r"the last one, could not be saved.*checkpoint-3"):
        surefoot.train(project.recipe, callbacks=[InTheWay()])
    assert not (project.run / "all_results.json").exists()


def test_changed_data_is_noticed_on_a_resume(trained):
    rows = (trained.folder / "data" / "sums.jsonl").read_text()
    (trained.folder / "data" / "sums.jsonl").write_text(rows + rows.splitlines()[0] + "\n")
    code, message = train(trained, "train.max_steps=6")
    assert code == 2
    assert "cannot resume from checkpoint-3: 1 row was added to sums, as row 24 (" in message
    assert "Restore that, or start a new run" in message


def test_a_checkpoint_of_another_model_is_refused(trained, tmp_path):
    other = Project(tmp_path / "other", kind="qwen3")
    code, message = train(other, f"checkpoint.resume={trained.run / 'checkpoint-3'}")
    assert code == 2
    assert "another model" in message or "tensors" in message


def test_weights_with_a_flipped_bit_are_not_gone_on_from(trained):
    folder = trained.run / "checkpoint-3"
    tensors = load_file(folder / "model.safetensors")
    next(iter(tensors.values())).view(-1)[0] += 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    code, message = train(trained)
    assert code == 2
    assert "it contains no valid checkpoint" in message
    assert "checkpoint-3/model.safetensors" in message
    assert folder.is_dir()
    code, message = train(trained, "checkpoint.resume=none")  # the cure that it names
    assert code == 0
    assert "checkpoint-3 failed verification" in message
    assert "starting from scratch" in message


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_write_permission_is_named(tmp_path):
    project = Project(tmp_path)
    project.run.mkdir()
    project.run.chmod(0o500)
    code, message = train(project)
    assert code == 2
    assert str(project.run) in message


def test_an_output_dir_that_is_a_file_is_named(tmp_path):
    project = Project(tmp_path)
    project.run.write_text("mine")
    code, message = train(project)
    assert (code, str(project.run) in message) == (2, True)
    assert project.run.read_text() == "mine"


def test_a_missing_model_is_said_together_with_what_else_is_missing(tmp_path):
    project = Project(tmp_path)
    adapter = str(tmp_path / "no-adapter")
    edit(model={"path": "./nowhere", "adapter": adapter}, data={"datasets": ["nothing"]})(project)
    edit(method="lora")(project)
    for command in ("train", "preview", "plan", "encode"):
        found = CliRunner().invoke(main, [command, str(project.recipe)])
        assert found.exit_code == 2, found.output
        assert "model.path: no folder" in found.stderr, command
        assert f"model.adapter: {adapter}: no adapter_config.json" in found.stderr
        assert "dataset 'nothing'" in found.stderr


def test_two_runs_in_one_folder_are_refused(tmp_path):
    import fcntl

    project = Project(tmp_path)
    project.run.mkdir()
    with (project.run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, message = train(project)
    assert (code, "another process" in message) == (2, True)
