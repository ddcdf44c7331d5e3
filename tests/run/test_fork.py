"""A fork continues a run after any step, saved or not; unchanged it ends in the run's bits, and it
needs nothing of the run."""

import errno
import json
import shutil
import signal
import time

import pytest
from click.testing import CliRunner

import surefoot
from crash.system import DEAD, System, dies_within, fails
from project import Project, assert_same, checkpoints, final_weights, in_child, metrics, start
from surefoot.checkpoint.disk.retention import origin_of, pinned
from surefoot.checkpoint.looking.listing import list_run
from surefoot.cli.main import main
from surefoot.storage import files
from surefoot.training.callbacks.metric_files import repeatable

LORA = {"lora": {"rank": 2, "dropout": 0.1}}


def said(*words):
    done = CliRunner().invoke(main, [str(word) for word in words])
    assert not done.exception or isinstance(done.exception, SystemExit), done.exc_info
    return done.exit_code, done.output


def figures(run):
    return [repeatable(record) for record in metrics(run)]


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """Evaluated and logged between saves."""
    folder = tmp_path_factory.mktemp("fork")
    train = {"eval_steps": 3, "log_steps": 2, "max_steps": 10}
    saves = {"save_steps": 4, "keep": None}
    project = Project(folder, method=LORA, data={"val_size": 4}, train=train, checkpoint=saves)
    surefoot.train(project.recipe)
    return project


@pytest.mark.parametrize("step", [4, 7, 2])
def test_a_fork_that_is_trained_to_the_end_has_the_bits_of_the_run(step, project, tmp_path):
    new = tmp_path / "new"
    before = sorted((p, p.stat().st_size, p.stat().st_mtime_ns) for p in project.run.rglob("*"))
    code, text = said("fork", project.run, new, "--step", step)
    assert code == 0, text
    assert f"{new}: continues {project.run} after step {step}" in text.replace("\n", "")
    assert ("replayed from" in text) == (step != 4)
    assert origin_of(new) == (str(project.run), step)
    assert pinned(new) == {step}
    assert list_run(new)[0].parent == str(project.run)
    after = sorted((p, p.stat().st_size, p.stat().st_mtime_ns) for p in project.run.rglob("*"))
    assert before == after
    run = shutil.copytree(project.run, tmp_path / "kept")
    surefoot.train(new)
    assert_same(final_weights(new), final_weights(run))
    assert figures(new) == figures(run)
    assert checkpoints(new)[0].name == f"checkpoint-{step}"


def test_a_fork_takes_other_settings_from_its_step_on(project, tmp_path):
    new = tmp_path / "new"
    words = ("optim.adamw.learning_rate=0.0003", "checkpoint.keep=1")
    code, text = said("fork", project.run, new, "--step", 4, *words)
    assert code == 0, text
    code, text = said("train", new)
    assert code == 0, text
    assert "optim.adamw.learning_rate: 0.003 -> 0.0003 since checkpoint-4: taken from" in text
    assert "nothing that bits depend on; from here on by the settings of this run" in text
    assert [path.name for path in checkpoints(new)] == ["checkpoint-4", "checkpoint-10"]
    same = [line["step"] for line in figures(new) if line in figures(project.run)]
    assert max(same) == 4
    changes = json.loads((new / "origin.json").read_text())["changes"]
    assert "optim.adamw.learning_rate: 0.003 -> 0.0003" in changes
    code, text = said("replay", new, "--step", 3)
    assert (code, f"it began from {project.run}/checkpoint-4, which has later" in text) == (2, True)
    code, text = said("train", new, "optim.adamw.learning_rate=0.5")  # it is a run like others now
    assert (code, "contains a run with other settings" in text) == (2, True)


def test_a_setting_by_which_the_state_means_something_is_refused(project, tmp_path):
    code, text = said("fork", project.run, tmp_path / "new", "--step", 4, "method.lora.alpha=99")
    assert code == 2
    assert "was trained with other settings (method.lora.alpha: " in text
    assert not (tmp_path / "new").exists()


def test_folders_and_steps_that_cannot_be_are_refused(project, tmp_path):
    code, text = said("fork", project.run, project.run, "--step", 4)
    assert (code, "it exists already; choose another folder" in text) == (2, True)
    code, text = said("fork", project.run, tmp_path / "new", "--step", 11)
    assert (code, "is at step 10, so there is no step 11" in text) == (2, True)
    assert list(tmp_path.iterdir()) == []


def test_a_step_that_comes_out_as_another_one_is_not_forked(project, tmp_path):
    run = shutil.copytree(project.run, tmp_path / "run")
    lines = metrics(run)
    lines[3]["loss"] += 1
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    code, text = said("fork", run, tmp_path / "new", "--step", 7)
    assert code == 2
    assert "is another one when it is computed again (" in text
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_killed_fork_leaves_no_run_and_the_next_one_cleans_up(project, tmp_path):
    new = tmp_path / "new"
    process = start("fork", project.run, new, "--step", "7")
    while process.poll() is None and not list(tmp_path.glob(".new.*.part/replay/*")):
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == []
    assert said("fork", project.run, new, "--step", "7")[0] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def seen(run):
    return {p: (p.stat().st_size, p.stat().st_mtime_ns, p.stat().st_nlink) for p in run.rglob("*")}


def forked_with(system, run, new, step):
    """The exit code of a fork, in a process of its own."""

    def work():
        files.os = system
        code, _ = said("fork", run, new, "--step", step)
        (new.parent / "calls").write_text(str(len(system.seen)))
        if code:
            raise SystemExit(code)

    return in_child(work)


@pytest.mark.proof
@pytest.mark.parametrize("fault", [dies_within, fails(errno.ENOSPC)], ids=["killed", "full"])
@pytest.mark.parametrize("step", [4, 7])
def test_a_fault_at_ten_places_leaves_the_run_and_no_half_a_fork(step, fault, project, tmp_path):
    """Killed, or with a full disk: what is there is a whole fork, or none, and a second one is."""
    shutil.copytree(project.run, tmp_path / "run")
    run, before = tmp_path / "run", seen(project.run)
    for name in ("first", "count"):  # the first one may find less in caches than the others
        assert forked_with(System(), project.run, tmp_path / name, step) == 0
    calls = int((tmp_path / "calls").read_text())
    whole = {p.relative_to(tmp_path / "count") for p in (tmp_path / "count").rglob("*")}
    for number in range(10):
        new = tmp_path / f"new-{number}"
        code = forked_with(System(fault, calls * number // 10), project.run, new, step)
        assert code == DEAD if fault is dies_within else code in (0, 1), number
        if not new.exists():
            assert forked_with(System(), project.run, new, step) == 0
        assert {p.relative_to(new) for p in new.rglob("*")} == whole
        assert not [p.name for p in tmp_path.iterdir() if p.name.startswith(f".{new.name}")]
        surefoot.train(new)
        assert_same(final_weights(new), final_weights(run))
    assert seen(project.run).keys() == before.keys()
    for path, (size, written, _) in seen(project.run).items():
        assert (size, written) == before[path][:2] or path.is_dir()
