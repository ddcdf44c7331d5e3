"""The card that is left beside the checkpoints of a run, an export and an adapter."""

import re

import pytest
from click.testing import CliRunner

import surefoot
from project import Project
from surefoot.cli.main import main


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    made = Project(
        tmp_path_factory.mktemp("card"),
        method={"lora": {"rank": 2}},
        data={"val_size": 4},
        train={"max_steps": 3, "eval_steps": 1, "load_best_model_at_end": True},
    )
    (made.folder / "model" / "README.md").write_text("---\nlicense: [\n---\n# Base\n")  # damaged
    surefoot.train(made.recipe)
    return made


def command(*words):
    done = CliRunner().invoke(main, [*map(str, words)])
    assert done.exit_code == 0, done.output


def opened(folder, within, monkeypatch):
    """What the code of the card in ``folder`` opens, run in the folder ``within``."""
    text = (folder / "README.md").read_text()
    monkeypatch.chdir(within)
    names = {}
    exec(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1], names)
    assert "model of" not in text and str(folder.parent) not in text
    return names["model"], text


def test_the_code_of_a_runs_card_opens_its_best_adapter(project, monkeypatch):
    best = surefoot.train(project.recipe).best_global_step
    model, text = opened(project.run, project.run, monkeypatch)
    assert f"checkpoint-{best}" in text
    assert model.peft_config["default"].r == 2
    for said in ("An adapter of model by sft (lora)", "`sums`", "![Loss of the run](loss.png)"):
        assert said in text


def test_an_export_and_an_adapter_have_a_card_and_it_may_be_edited(project, tmp_path, monkeypatch):
    command("export", project.run, tmp_path / "out")
    model, text = opened(tmp_path / "out", tmp_path, monkeypatch)
    assert "A model trained from model by sft (lora)" in text and not hasattr(model, "peft_config")
    (tmp_path / "out" / "README.md").write_text("mine")
    command("export", "verify", tmp_path / "out")
    command("ckpt", "convert", project.run / "checkpoint-3", tmp_path / "peft", "--to", "peft")
    assert hasattr(opened(tmp_path / "peft", tmp_path, monkeypatch)[0], "peft_config")


def test_a_card_is_written_again_unless_it_is_somebodys_own(project):
    path = project.run / "README.md"
    ours = path.read_text()
    results = project.run / "all_results.json"
    for text, expected in ((f"{ours}old", ours), ("mine", "mine")):
        path.write_text(text)
        results.unlink()  # so that the run is ended again
        surefoot.train(project.recipe)
        assert path.read_text() == expected
