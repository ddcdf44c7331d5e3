"""A run behind the server: its checkpoints by name, and the examples of the guide."""

import contextlib
import io
import json
import re
import subprocess
from pathlib import Path

import pytest

import surefoot
from answering import sample
from folders import save_recipe
from surefoot.generate.section import GenerateSection
from surefoot.plugins.serve.engine import EngineThread
from surefoot.plugins.serve.models import Models, ServeSettings
from surefoot.use import open_model

from .running import running

GUIDE = Path(__file__).parents[3] / "docs" / "how-to" / "serve.md"
PROMPT = [16, 10, 17, 30]
ADDRESS = "http://127.0.0.1:8000"


def trained(folder, method):
    folder.mkdir()
    recipe = save_recipe(folder, method=method, optim={"adamw": {"learning_rate": 0.05}})
    surefoot.train(recipe)
    return folder / "run"


def answer(path):
    section = GenerateSection(max_new_tokens=12)
    (found,) = sample(open_model(path).model, [PROMPT], section, stop_token_ids=[]).values()
    return list(found.ids), list(found.logps)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("runs") / "lora", {"lora": {"rank": 4}})


@pytest.mark.parametrize("invariant", [False, True])
def test_rows_are_computed_in_the_same_shapes_if_the_server_is_to(invariant, run):
    models = Models(ServeSettings(path=str(run), batch_invariant=invariant), EngineThread())
    models.open_first()
    driver = models.first.lane.rows.waiting.driver
    assert driver.batch_invariant == invariant
    names = [None, "default", "default"]
    with driver.adapters.on(names):
        (group,) = driver.adapters._groups
    assert len(group.padded_rows) == (4 if invariant else 2)


def asked(client, name):
    body = {"model": name, "prompt": PROMPT, "max_tokens": 12, "ignore_eos": True}
    found = client.ok("/v1/completions", **body, logprobs=0, return_token_ids=True)["choices"][0]
    return found["token_ids"], found["logprobs"]["token_logprobs"]


def check(run):
    """Each checkpoint answers as it does alone, however often others were asked between."""
    expected = {f"checkpoint-{step}": answer(run / f"checkpoint-{step}") for step in (2, 4)}
    ids, logps = zip(*expected.values(), strict=True)
    assert ids[0] != ids[1] or max(abs(a - b) for a, b in zip(*logps, strict=True)) > 1e-3
    with running(run) as client:
        for name in ("checkpoint-2", "checkpoint-4", "checkpoint-2", run.name):
            ids, logps = expected.get(name, expected["checkpoint-4"])
            found = asked(client, name)
            assert found[0] == ids
            assert found[1] == pytest.approx(logps, abs=1e-5)
        assert client.post("/v1/completions", model="checkpoint-3", prompt="x")[0] == 404
        return [card["id"] for card in client.http.get("/v1/models").json()["data"]]


def test_checkpoints_with_adapters_share_their_base(run):
    assert check(run) == ["run", "checkpoint-2", "checkpoint-4", "base"]


@pytest.mark.proof
def test_full_checkpoints_are_opened_one_at_a_time(tmp_path):
    assert check(trained(tmp_path / "full", "full")) == ["run", "checkpoint-2", "checkpoint-4"]


def test_the_examples_of_the_guide_run(run, tmp_path, monkeypatch):
    pytest.importorskip("llguidance")
    pytest.importorskip("openai")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "other").symlink_to(run)
    monkeypatch.chdir(tmp_path)
    text = GUIDE.read_text()
    shells, (python,) = (
        re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL) for language in ("sh", "python")
    )
    curls = [block for block in shells if block.startswith("curl")]
    assert len(curls) == 3
    with running(run, name="quickstart") as client:
        found = [_output(block.replace(ADDRESS, client.url)) for block in curls]
        with contextlib.redirect_stdout(io.StringIO()):
            exec(python.replace(ADDRESS, client.url), {})
    plain, adapters, forced = found
    assert json.loads(plain)["model"] == "quickstart"
    assert adapters.count("Success") == 2
    choice = json.loads(forced)["choices"][0]
    if choice["finish_reason"] == "stop":
        assert json.loads(choice["message"]["content"]).keys() == {"quantity"}


def _output(command):
    done = subprocess.run(["bash", "-ec", command], capture_output=True, text=True, check=True)
    return done.stdout
