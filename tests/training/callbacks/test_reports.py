import json
import posixpath
import queue
import re

import pytest

from hooks import listening
from project import Project, surefoot
from surefoot.training.callbacks._tracker_process import Feeder
from surefoot.training.callbacks._tracker_services import _mlflow_name

SECRET = "T0P-s3cret"


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    return Project(tmp_path_factory.mktemp("reports"), train={"max_steps": 3, "webhook": "HOOK"})


def test_a_run_sends_its_end_and_its_failure_and_keeps_the_url_to_itself(project, monkeypatch):
    with listening() as server:
        monkeypatch.setenv("HOOK", server.url)
        code, _, err = surefoot("train", project.recipe)
        assert code == 0, err
        bad = ["train.max_steps=5", "optim.adamw.learning_rate=1e30", "checkpoint.resume=none"]
        bad += [f"train.output_dir={project.folder / 'bad'}", "train.run_name=bad one"]
        code, _, err = surefoot("train", project.recipe, *bad)
        assert code == 2, err
    (_, end), (_, failure) = server.received
    assert (end["event"], end["run"], end["step"]) == ("complete", "run", 3)
    assert end["loss"] == json.loads(last_line(project.run))["loss"]
    assert (failure["event"], failure["run"]) == ("failed", "bad one")
    assert "NaN" in failure["error"] or "infinite" in failure["error"]
    files = [path for path in project.folder.rglob("*") if path.is_file()]
    assert any(path.name == "manifest.json" for path in files)
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
    assert SECRET not in err
    assert "dropped" not in err


def last_line(run):
    return (run / "metrics.jsonl").read_text().splitlines()[-1]


def test_a_skipped_step_is_sent_once(project, monkeypatch):
    run = project.folder / "skipped"
    with listening() as server:
        monkeypatch.setenv("HOOK", server.url)
        more = ["train.on_nan=skip", "train.max_steps=4", "optim.adamw.learning_rate=1e30"]
        code, _, err = surefoot("train", project.recipe, f"train.output_dir={run}", *more)
    assert code == 3, err
    assert [sent["event"] for _, sent in server.received] == ["nan", "complete"]


def test_what_is_missing_is_an_error_before_the_data_is_read(project, monkeypatch):
    monkeypatch.delenv("HOOK", raising=False)
    run = f"train.output_dir={project.folder / 'early'}"
    code, _, err = surefoot("train", project.recipe, run)
    assert (code, err.count("encoded in")) == (2, 0)
    assert "train.webhook: the environment variable HOOK is not set" in err
    recipe = project.folder / "literal.yaml"
    recipe.write_text(project.recipe.read_text().replace('"HOOK"', f'"http://x/{SECRET}"'))
    code, _, err = surefoot("train", recipe, run)
    assert code == 2
    assert "webhook: expected the name of an environment variable" in err
    assert SECRET not in err


class Recorder:
    place, event = "here", None

    def __init__(self):
        self.rows, self.ended = [], None

    def log(self, record, step, line):
        self.rows.append((step, line, record.get("loss", record.get("eval_loss"))))

    def finish(self, outcome, facts):
        self.ended = outcome


def feeding(folder):
    said, trackers = [], []
    feeder = Feeder("none", {"folder": str(folder)}, lambda text, is_warning: said.append(text))

    def opened():
        feeder.tracker = Recorder()
        trackers.append(feeder.tracker)
        return feeder.tracker

    feeder.open = opened
    return feeder, trackers, said


def put(folder, *rows):
    lines = [json.dumps({"step": s, name: v}) + "\n" for s, name, v in rows]
    (folder / "metrics.jsonl").write_text("".join(lines))


def test_repeated_steps_are_sent_once_in_the_same_launch_and_in_later_ones(tmp_path):
    first = [(1, "loss", 3.0), (2, "loss", 2.0), (2, "eval_loss", 2.5)]
    put(tmp_path, *first)
    feeder, trackers, said = feeding(tmp_path)
    feeder.send()
    feeder.send()
    put(tmp_path, *first, (3, "loss", 1.0))
    feeder.send()
    assert [one.rows for one in trackers] == [[(1, 1, 3.0), (2, 2, 2.0), (2, 3, 2.5), (3, 4, 1.0)]]
    later, trackers, _ = feeding(tmp_path)
    later.send()
    assert trackers == []  # none is opened for nothing
    put(tmp_path, *first, (3, "loss", 1.0), (4, "loss", 0.5))
    later.send()
    assert trackers[0].rows == [(4, 5, 0.5)]
    assert said == []
    assert later.sent.id == feeder.sent.id


def test_mlflow_gets_names_that_it_takes():
    """By the rule of mlflow/utils/validation.py, 3.17; one bad name would end the whole run."""
    names = ["train/pass@8", "eval/held(out)=1_loss", "eval/a//b", "eval/../x", "eval/.", "x" * 300]
    for name in names:
        made = _mlflow_name(name)
        assert re.fullmatch(r"[/\w.\- :]{1,250}", made), made
        assert posixpath.normpath(made) == made and not made.startswith((".", "/")), made
    assert _mlflow_name("train/pass@8") == "train/pass_8"
    assert _mlflow_name("eval/held-out.1 a:b_loss") == "eval/held-out.1 a:b_loss"


def test_steps_with_other_values_are_kept_as_they_were_sent_and_that_is_said(tmp_path):
    put(tmp_path, *[(step, "loss", 1 / step) for step in range(1, 5)])
    feeder, trackers, said = feeding(tmp_path)
    feeder.send()
    put(tmp_path, (1, "loss", 1.0), (2, "loss", 0.5), (3, "loss", 0.2))
    feeder.send()
    put(tmp_path, (1, "loss", 1.0), (2, "loss", 0.5), (3, "loss", 0.2), (4, "loss", 0.1))
    feeder.send()
    put(
        tmp_path, *[(step, "loss", 1 / step) for step in (1, 2)], (3, "loss", 0.2), (5, "loss", 9.0)
    )
    feeder.send()
    assert [step for step, _, _ in trackers[0].rows] == [1, 2, 3, 4, 5]
    assert said == [
        "steps up to 4 are repeated with other values; it keeps those that it got first, "
        "metrics.jsonl has the last"
    ]


def test_a_run_from_scratch_is_another_curve(tmp_path):
    put(tmp_path, (1, "loss", 1.0), (2, "loss", 0.5))
    feeder, trackers, said = feeding(tmp_path)
    feeder.send()
    known = feeder.sent.id
    (tmp_path / "metrics.jsonl").write_text("")  # cut, and seen before it is written again
    feeder.send()
    put(tmp_path, (1, "loss", 7.0))
    feeder.send()
    assert [one.rows for one in trackers] == [[(1, 1, 1.0), (2, 2, 0.5)], [(1, 1, 7.0)]]
    assert trackers[0].ended == "stopped"
    assert feeder.sent.id != known
    assert said == ["a run from scratch is another curve: a new one begins"]


def test_all_lines_are_sent_before_the_end(tmp_path):
    feeder, trackers, _ = feeding(tmp_path)
    events = queue.Queue()
    put(tmp_path, (1, "loss", 1.0))
    events.put({"event": "end", "outcome": "complete"})
    feeder.follow(events)
    assert (len(trackers[0].rows), trackers[0].ended) == (1, "complete")
