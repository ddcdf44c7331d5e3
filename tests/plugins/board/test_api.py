import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import time

import pytest
from starlette.testclient import TestClient

from surefoot import __version__
from surefoot.plugins.board.app import STATIC, create_app
from surefoot.plugins.board.processes import ChildCommands
from surefoot.training.callbacks.launches import process, started

from .runs import COMPLETE, RECIPE, write_run

MINE = {"X-Surefoot": "1"}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("root")
    write_run(root / "runs/one", end=COMPLETE)
    write_run(
        root / "runs/two",
        steps=4000,
        offset=1.0,
        recipe=RECIPE.replace("1.0e-3", "2.0e-3").replace("runs/one", "runs/two"),
    )
    write_run(root / "deep/er/three", end={"outcome": "failed", "error": "the loss is nan"})
    (root / "recipes").mkdir()
    (root / "recipes/mine.yaml").write_text(RECIPE.replace("runs/one", "runs/mine"))
    return root


@pytest.fixture(scope="module")
def board(root):
    with TestClient(create_app(root), base_url="http://127.0.0.1:7860", headers=MINE) as client:
        yield client


def test_the_rows_of_a_step_are_named_by_a_command(board):
    job = board.post("/api/rows", json={"run": "runs/one", "step": 3}).json()
    assert job["command"] == "surefoot rows runs/one --step 3"
    while (job := board.get("/api/job", params={"number": job["job"]}).json())["code"] is None:
        time.sleep(0.1)
    assert job["code"] == 2  # a run of an earlier version
    assert "has no metrics of its steps and rows" in job["error"]
    assert board.post("/api/rows", json={"run": "runs/one", "step": 0}).status_code == 422


def row_of(board, run):
    return next(row for row in board.get("/api/runs").json()["runs"] if row["run"] == run)


def test_every_run_below_the_root_is_found_with_its_figures(board):
    rows = {row["run"]: row for row in board.get("/api/runs").json()["runs"]}
    assert rows.keys() == {"runs/one", "runs/two", "deep/er/three"}
    assert rows["runs/one"]["state"] == "complete"
    assert rows["runs/one"]["loss"] == pytest.approx(2 / 20**0.5)
    assert rows["runs/one"]["metric"] == {"name": "eval_loss", "value": 0.5}
    assert (rows["runs/two"]["state"], rows["runs/two"]["step"]) == ("died", 4000)
    assert board.get("/api/run", params={"run": "runs/two"}).json()["size"] > 100_000
    assert rows["deep/er/three"]["end"]["error"] == "the loss is nan"
    assert rows["runs/one"]["method"] == "lora"


def test_a_run_that_trains_is_running_with_the_time_that_is_left(board, root):
    folder = write_run(root / "runs/live", steps=40)
    beat = {"time": 1000.0, "since": 900.0, "first_step": 20, "step": 40, "max_steps": 100}
    (folder / ".heartbeat.json").write_text(json.dumps(beat))
    with (folder / ".lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        row = row_of(board, "runs/live")
        assert (row["state"], row["step"], row["max_steps"]) == ("running", 40, 100)
        assert row["seconds_left"] == pytest.approx(60 * 100 / 20)
        assert row["is_stalled"], "the last heartbeat is decades old"
    assert row_of(board, "runs/live")["state"] == "died"
    shutil.rmtree(folder)
    assert board.get("/api/run", params={"run": "runs/live"}).status_code == 404


def test_curves_are_thinned_zoomed_and_smoothed(board):
    def series(**query):
        return board.get("/api/series", params={"run": "runs/two", **query}).json()["series"]

    found = series(names="loss,eval_loss,nothing", points=100)
    assert found.keys() == {"loss", "eval_loss"}
    assert found["loss"]["total"] == 4000
    assert len(found["loss"]["steps"]) <= 104
    assert found["loss"]["values"][0] == pytest.approx(3.0)
    near = series(names="loss", points=1000, first=100, last=200)["loss"]
    assert (near["steps"][0], near["steps"][-1]) == (99, 201)
    smooth = series(names="loss", points=100, smooth=8)["loss"]["smooth"]
    assert smooth["steps"][0] == 1
    assert max(smooth["values"]) < 3.01


def test_memory_and_the_time_lost_to_saves_are_summed_over_launches(board, root):
    logs = [{"event": "log", "step": 5, "peak_memory": 7, "save_blocking_seconds": 2.0}]
    logs += [
        {"event": "launch"},
        {"event": "log", "step": 9, "peak_memory": 8, "save_blocking_seconds": 1.5},
    ]
    folder = write_run(root / "runs/resumed", launches=logs)
    found = board.get(
        "/api/series", params={"run": "runs/resumed", "names": "peak_memory,save_blocking_seconds"}
    ).json()["series"]
    assert found["save_blocking_seconds"]["values"] == [2.0, 3.5]
    assert found["peak_memory"]["steps"] == [5, 9]
    assert len(board.get("/api/run", params={"run": "runs/resumed"}).json()["launches"]) == 2
    shutil.rmtree(folder)


def test_slow_ranks_are_told_with_their_launch(board, root):
    slow = {"event": "slow_rank", "step": 5, "rank": 3, "what": "data", "share": 0.6}
    folder = write_run(root / "runs/slow", launches=[slow, {"event": "launch"}, slow | {"rank": 1}])
    details = board.get("/api/run", params={"run": "runs/slow"}).json()
    ranks = [[row["rank"] for row in launch["slow_ranks"]] for launch in details["launches"]]
    assert ranks == [[3], [1]]
    shutil.rmtree(folder)


def test_what_is_broken_is_shown_as_what_it_is(board, root):
    folder = write_run(root / "runs/broken")
    (folder / "metrics.jsonl").write_text(
        '{"step": 1, "loss": 1.0}\n{"step": 2, "lo\nnonsense\n{"step": 3, "loss": 0.5}\n'
    )
    (folder / "recipe.yaml").write_text("model: [\n")
    (folder / "rollouts-4.jsonl").write_text('{"origin": "a:1"}\n{half\n')
    (folder / "checkpoint-7").mkdir()
    details = board.get("/api/run", params={"run": "runs/broken"}).json()
    assert "2 lines are not a record" in details["metrics_problem"]
    assert "not YAML" in details["row"]["recipe_problem"]
    assert row_of(board, "runs/broken")["broken_metrics"]
    samples = board.get(
        "/api/samples", params={"run": "runs/broken", "file": "rollouts-4.jsonl"}
    ).json()
    assert (len(samples["rows"]), samples["broken"]) == (1, 1)
    (line,) = board.get("/api/checkpoints", params={"run": "runs/broken"}).json()["checkpoints"]
    assert line["problem"]
    shutil.rmtree(folder)
    assert (
        board.get("/api/series", params={"run": "runs/broken", "names": "loss"}).status_code == 404
    )


def test_the_recipes_of_two_runs_are_compared(board):
    found = board.get("/api/diff", params={"a": "runs/one", "b": "runs/two"}).json()
    changes = {one["path"]: (one["old"], one["new"]) for one in found["changes"]}
    assert changes["optim.adamw.learning_rate"] == (1e-3, 2e-3)
    assert changes.keys() <= {"optim.adamw.learning_rate", "train.output_dir"}


def test_problems_are_at_their_lines(board):
    text = RECIPE.replace("max_steps", "max_step")
    found = board.post("/api/check", json={"text": text}).json()
    ((problem),) = found["problems"]
    assert (problem["line"], "did you mean max_steps" in problem["message"]) == (5, True)
    assert board.post("/api/check", json={"text": RECIPE}).json()["problems"] == []
    (problem,) = board.post("/api/check", json={"text": "a: ["}).json()["problems"]
    assert problem["line"] == 1
    outside = RECIPE.replace("runs/one", "/elsewhere")
    assert (
        "would not see"
        in board.post("/api/check", json={"text": outside}).json()["problems"][0]["message"]
    )


def test_the_form_edits_the_text_and_keeps_its_comments(board):
    text = "# mine\n" + RECIPE.replace("max_steps: 100}", "max_steps: 100}  # few")

    def edit(text, keys, value):
        answer = board.post("/api/edit", json={"text": text, "keys": keys, "value": value})
        assert answer.status_code == 200, answer.text
        return answer.json()["text"]

    more = edit(text, ["train", "max_steps"], 200)
    assert more == text.replace("max_steps: 100}", "max_steps: 200}")
    ranked = edit(more, ["method", "lora", "rank"], 4)
    assert board.post("/api/check", json={"text": ranked}).json()["data"]["method"] == {
        "lora": {"rank": 4}
    }
    assert edit(ranked, ["method"], "lora").count("rank") == 0
    assert "optim" not in edit(text, ["optim", "adamw", "learning_rate"], None)
    assert (
        board.post("/api/edit", json={"text": "a: [", "keys": ["a"], "value": 1}).status_code == 409
    )


def test_a_recipe_with_problems_is_not_started_and_a_file_is_not_replaced(board, root):
    bad = {"text": "model: 1", "file": "recipes/bad.yaml"}
    assert board.post("/api/start", json=bad).status_code == 409
    assert not (root / "recipes/bad.yaml").exists()
    other = {"text": RECIPE, "file": "recipes/mine.yaml"}
    assert "another text" in board.post("/api/start", json=other).json()["error"]
    assert "runs/mine" in (root / "recipes/mine.yaml").read_text()
    with (root / "runs/one/.lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        taken = board.post("/api/start", json={"text": RECIPE, "file": "recipes/fresh.yaml"})
    assert "already" in taken.json()["error"]


def test_what_training_says_goes_to_the_log_of_its_run(board, root):
    commands, end = ChildCommands(root), time.monotonic() + 60
    pid = commands.train(["version"], root / "runs/started")
    assert os.getsid(pid) == pid, "a session of its own"
    while commands.reap():
        assert time.monotonic() < end
        time.sleep(0.05)
    said = (root / "runs/started/train.log").read_text()
    assert said == f"$ surefoot version\n{__version__}\n"


def test_what_is_tried_is_the_text_of_the_page_and_not_the_file(board, root):
    text = RECIPE.replace("path: base-model", "path: no-model-of-this-name").replace(
        "runs/one", "runs/mine"
    )
    body = {"text": text, "file": "recipes/mine.yaml", "command": "plan"}
    job = board.post("/api/try", json=body).json()
    assert job["command"] == "surefoot plan recipes/mine.yaml --json"
    drafts = list((root / "recipes").glob(".surefoot-draft*"))
    assert [draft.read_text() for draft in drafts] == [text]
    board.post("/api/cancel", params={"number": job["job"]})
    end = time.monotonic() + 20
    while list((root / "recipes").glob(".surefoot-draft*")):
        assert time.monotonic() < end
        time.sleep(0.05)
    assert "runs/mine" in (root / "recipes/mine.yaml").read_text()


def test_where_the_time_of_a_run_went_is_on_its_page(board, root):
    spent = {"starting": 10.0, "training": 45.0, "saving": 5.0}
    end = {"outcome": "complete", "step": 20, "seconds": spent}
    folder = write_run(root / "runs/timed", end=end)
    goodput = board.get("/api/run", params={"run": "runs/timed"}).json()["goodput"]
    parts = {name: seconds for name, seconds in goodput["seconds"].items() if seconds}
    assert parts == {"trained": 45, "saving": 5, "starting": 10}
    assert (goodput["wall"], goodput["goodput"]) == (60, 0.75)
    (folder / "launches.jsonl").write_text("[]\n")
    assert board.get("/api/run", params={"run": "runs/timed"}).json()["goodput"] is None
    shutil.rmtree(folder)


def test_only_the_process_of_a_run_is_stopped(board, root):
    folder = write_run(root / "runs/mine")
    nobody = board.post("/api/stop", params={"run": "runs/mine"})
    assert (nobody.status_code, "no process" in nobody.json()["error"]) == (409, True)
    with subprocess.Popen(["sleep", "60"]) as sleeper, (folder / ".lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        elsewhere = board.post("/api/stop", params={"run": "runs/mine"})
        assert "stop it where it was started" in elsewhere.json()["error"]
        mine = {"event": "launch", **process(), "pid": sleeper.pid}
        for pid_started, is_stopped in (("another/1", False), (started(sleeper.pid), True)):
            line = json.dumps({**mine, "pid_started": pid_started})
            (folder / "launches.jsonl").write_text(f"{line}\n")
            answer = board.post("/api/stop", params={"run": "runs/mine"})
            assert answer.is_success == is_stopped
        assert sleeper.wait(20) == -signal.SIGTERM
    shutil.rmtree(folder)


def test_a_command_runs_beside_the_board_and_its_answer_is_fetched(board, root):
    body = {"command": "prune-plan", "run": "runs/one", "keep": 1}
    job = board.post("/api/checkpoints", json=body).json()
    assert job["command"] == "surefoot ckpt prune runs/one --dry-run --json --keep=1"
    end = time.monotonic() + 60
    while (job := board.get("/api/job", params={"number": job["job"]}).json())["code"] is None:
        assert time.monotonic() < end
        time.sleep(0.1)
    assert job["code"] == 2
    assert "no complete Surefoot checkpoint" in job["error"]
    body = {"command": "verify", "run": "runs/one", "checkpoint": "../two/checkpoint-1"}
    assert "is not a checkpoint" in board.post("/api/checkpoints", json=body).json()["error"]


def test_behind_a_proxy_with_a_path_nothing_leaves_that_path(board):
    """As JupyterHub's, which shows the board below /user/me/proxy/7860/."""
    addresses = re.findall(r'(?:href|src)="([^"#]+)"', board.get("/").text)
    assert len(addresses) == 5
    assert all(board.get(f"/{address}").status_code == 200 for address in addresses)
    scripts = {file.name: file.read_text() for file in STATIC.glob("*.js")}
    rooted = {n: re.findall(r"""["'`]/(?:api|static)[^"'`]*""", s) for n, s in scripts.items()}
    assert not {name: found for name, found in rooted.items() if found}
    assert not any(address.startswith("/") for address in addresses)
    assert sum(s.count('"api/') for s in scripts.values()) > 20


def test_the_pages_files_are_small_and_complete(board):
    page = board.get("/")
    assert "script-src 'self'" in page.headers["content-security-policy"]
    names = ["style.css", "theme.js", "app.js", "vendor/uPlot.js", "vendor/uPlot.css"]
    assert all(board.get(f"/static/{name}").status_code == 200 for name in names)
    assert "MIT" in board.get("/static/vendor/uPlot.LICENSE").text
