"""The seam of plugins: what they name is there, and a stranger's package adds to the lists."""

import importlib
import json
import shutil
import subprocess
import sys

import pytest
from click.testing import CliRunner

import surefoot
from docs.pages import ROOT, blocks
from each import each
from project import Project, assert_same, checkpoints, final_weights, in_child, losses, metrics
from surefoot import extensions
from surefoot.cli.main import main
from surefoot.errors import SurefootError
from surefoot.extensions import BUNDLED, Extended, imported

PAGE = ROOT / "docs" / "how-to" / "your-own-stage.md"


@each(BUNDLED, str)
def test_what_a_plugin_names_exists(place):
    for named in imported(place).lists().values():
        for entry in named.values():
            imported(entry)


def test_a_plugin_module_is_light():
    code = "import sys; from surefoot.extensions import installed; installed(); print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"torch", "numpy", "transformers", "pydantic"}
    assert not heavy & set(found.stdout.split())


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """The package of the page, installed into a folder of its own."""
    source, target = (tmp_path_factory.mktemp(name) for name in ("source", "installed"))
    for block in blocks(PAGE):
        if block.title:
            (source / block.title).parent.mkdir(exist_ok=True)
            (source / block.title).write_text(block.text)
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--target", str(target)]
    command = [sys.executable, "-m", "pip", "install", *options, str(source)]
    subprocess.run(command, check=True, capture_output=True)
    return target


def forget():
    """Look for plugins again."""
    extensions.installed.cache_clear()
    extensions.entries.cache_clear()


@pytest.fixture
def seen(package, monkeypatch):
    """Whether this process has the package; afterwards it has not."""
    monkeypatch.syspath_prepend(package)
    importlib.invalidate_caches()
    forget()
    yield
    forget()


def test_a_package_adds_a_stage_an_optimizer_and_a_callback(seen, tmp_path):
    project = Project(tmp_path / "a", checkpoint={"save_steps": 2})
    project.sections |= {"stage": {"focal": {"gamma": 1}}, "optim": {"signum": {}}}
    project.sections["train"] |= {"max_steps": 4, "callbacks": [{"stop_below": {"loss": 0.01}}]}
    project.write()

    def work():
        surefoot.train(project.recipe)
        shutil.copytree(project.run, tmp_path / "resumed")
        shutil.rmtree(tmp_path / "resumed" / "checkpoint-4")
        surefoot.train(project.recipe, train={"output_dir": str(tmp_path / "resumed")})

    assert in_child(work) == 0
    expected = final_weights(project.run)
    project.sections["train"]["output_dir"] = str(tmp_path / "resumed")
    assert [path.name for path in checkpoints(project.run)] == ["checkpoint-2", "checkpoint-4"]
    assert_same(final_weights(project.run), expected)


@pytest.mark.proof
def test_its_focal_loss_at_gamma_0_is_that_of_sft(seen, tmp_path):
    measured = {"max_steps": 2, "eval_steps": 2}
    project = Project(tmp_path, train=measured, data={"val_size": 4})

    def work():
        surefoot.train(project.recipe)
        other = {"train": {"output_dir": str(tmp_path / "focal")}}
        surefoot.train(project.recipe, stage={"focal": {"gamma": 0}}, **other)

    assert in_child(work) == 0
    expected, *measured = losses(project.run), metrics(project.run), metrics(tmp_path / "focal")
    assert losses(tmp_path / "focal") == pytest.approx(expected, rel=1e-6)
    assert len(expected) == 2
    sft, focal = (
        [row["eval_perplexity"] for row in rows if "eval_perplexity" in row] for rows in measured
    )
    assert focal == pytest.approx(sft, rel=1e-6)
    assert len(sft) == 1


def test_a_package_adds_a_command(seen):
    done = CliRunner().invoke(main, ["hello"])
    assert (done.exit_code, done.output) == (0, "hello\n")
    assert "hello" not in CliRunner().invoke(main, ["--help"]).output  # reads no entry points


def test_without_the_package_the_command_is_unknown():
    assert CliRunner().invoke(main, ["hello"]).exit_code == 2


ENTRY_POINTS = "[surefoot.plugins]\nbroken = broken:PLUGIN\ngone = nowhere:PLUGIN\n"
PLUGIN = """
from surefoot.extensions import Plugin
PLUGIN = Plugin(
    name="broken",
    stages={"sft": "broken:PLUGIN", "odd": "broken:NOTHING"},
    optimizers={"signum": "broken:PLUGIN"},
)
"""


def test_a_broken_plugin_is_named_and_breaks_nothing(seen, tmp_path, monkeypatch, capsys):
    (tmp_path / "broken.py").write_text(PLUGIN)
    installed = tmp_path / "broken-2.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 2.0\n")
    (installed / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(tmp_path)
    forget()
    done = CliRunner().invoke(main, ["plugins", "--json"])
    stages = Extended("stages", {"sft": 1})
    names = list(stages)
    rows = json.loads(done.stdout)
    found = {(row["plugin"], row["name"]): (row["from"], row["problem"]) for row in rows}
    assert found["focal", "focal"] == ("surefoot-focal 1.0", None)
    assert found["mindspore", "mindspore"] == ("bundled", None)
    assert found["broken", "sft"] == ("broken 2.0", "Surefoot itself has one of this name")
    assert "no attribute 'NOTHING'" in found["broken", "odd"][1]
    assert "No module named 'nowhere'" in found["gone", ""][1]
    assert names == ["sft", "focal"]
    taken = "the plugin broken has one of this name"
    assert found["focal", "signum"] == ("surefoot-focal 1.0", taken)
    assert "odd of a plugin's stages is skipped" in capsys.readouterr().err
    with pytest.raises(SurefootError, match="cannot be imported"):
        stages["odd"]
