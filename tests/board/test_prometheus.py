import math

import pytest
from starlette.testclient import TestClient

from board.runs import COMPLETE, write_run
from surefoot.board.api.prometheus import STATES, exposition
from surefoot.board.app import create_app
from surefoot.board.host_names import hosts_of

parser = pytest.importorskip("prometheus_client.parser")
ODD = 'a "quoted" \\ name\nof two lines {x="1"} 1'


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("root")
    write_run(root / "one", end=COMPLETE)
    write_run(root / ODD, offset=1.0)
    return root


def samples(text):
    return [s for family in parser.text_string_to_metric_families(text) for s in family.samples]


def test_every_run_is_there_with_its_figures_and_its_name_as_it_is(root):
    with TestClient(create_app(root), base_url="http://127.0.0.1:7860") as board:
        answer = board.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = {(s.name, s.labels.get("run")): s for s in samples(answer.text)}
    for run, state, offset in (("one", "complete", 0.0), (ODD, "died", 1.0)):
        assert found["surefoot_run_info", run].labels["state"] == state
        assert found["surefoot_run_info", run].labels["method"] == "lora"
        assert found["surefoot_run_step", run].value == 20
        expected = pytest.approx(2 / math.sqrt(20) + offset)
        assert found["surefoot_run_loss", run].value == expected
        assert found["surefoot_run_metric", run].labels["metric"] == "eval_loss"
        assert found["surefoot_run_tokens_per_second", run].value == 1000
    counts = {s.labels["state"]: s.value for s in samples(answer.text) if s.name == "surefoot_runs"}
    assert counts == dict.fromkeys(STATES, 0) | {"complete": 1, "died": 1}


def test_a_figure_that_is_not_known_has_no_line():
    row = {"run": "a", "state": "ended", "loss": None, "step": None, "metric": {"value": None}}
    assert {s.name for s in samples(exposition([row]))} == {"surefoot_runs", "surefoot_run_info"}
    assert samples(exposition([])) != []
    strange = exposition([{"run": "a\udcff", "state": "ended"}])
    assert [s.labels["run"] for s in samples(strange) if "run" in s.labels] == ["a?"]


def test_a_board_with_a_token_wants_it(root):
    app = create_app(root, token="a-long-secret", hosts=hosts_of("0.0.0.0", ["gpu-7"]))
    with TestClient(app, base_url="http://gpu-7:7860", follow_redirects=False) as board:
        assert board.get("/metrics").status_code == 401
        wrong = board.get("/metrics", headers={"Authorization": "Bearer a-long-secre"})
        assert wrong.status_code == 401
        right = board.get("/metrics", headers={"Authorization": "Bearer a-long-secret"})
        assert right.status_code == 200 and "surefoot_run_step" in right.text
