import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hooks import listening, wait_for
from surefoot.errors import RunError
from surefoot.training.callbacks import _webhook as webhook
from surefoot.training.callbacks import trackers as launching
from surefoot.training.callbacks._tracker_services import TrackedRun
from surefoot.training.callbacks.launches import redacted
from surefoot.training.callbacks.trackers import TrackerProcess, finish

RUN = TrackedRun(Path("runs/one"), Path("x"), "id", "one", None, {})


def process(folder, url):
    order = {"folder": str(folder), "run_name": "one", "is_eager": True}
    return TrackerProcess("webhook", order, {"_SUREFOOT_WEBHOOK_URL": url})


@pytest.fixture(autouse=True)
def log(caplog):
    logger = logging.getLogger("surefoot")
    logger.propagate, before = True, logger.propagate
    caplog.set_level(logging.INFO)
    yield caplog
    logger.propagate = before


def test_nan_and_the_end_are_sent_with_the_last_loss_and_no_secret_is_logged(tmp_path, log):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 3, "loss": 2.5}) + "\n")
    with listening() as server:
        one = process(tmp_path, server.url)
        one.start()
        one.tell(event="nan", step=4)
        finish([one], outcome="failed", error="the loss is NaN")
    (path, nan), (_, end) = server.received
    assert path == "/hooks/T0P-s3cret"
    assert (nan["event"], nan["step"], nan["run"]) == ("nan", 4, "one")
    assert (end["event"], end["step"], end["loss"]) == ("failed", 3, 2.5)
    assert end["text"] == "one has failed, step 3, loss 2.5: the loss is NaN"
    assert "webhook: messages to 127.0.0.1" in log.text
    assert "s3cret" not in log.text
    written = [p.read_text() for p in tmp_path.rglob("*") if p.is_file()]
    assert "s3cret" not in "".join(written)


def test_a_process_that_is_killed_is_reported(tmp_path):
    code = (
        "import os, signal, sys; sys.path[:0] = ['tests', 'tests/training/callbacks']\n"
        "from test_webhook import process; from pathlib import Path\n"
        "one = process(Path(sys.argv[1]), sys.argv[2]); one.start()\n"
        "one.tell(event='nan', step=1); sys.stdin.read(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    with listening() as server:
        command = [sys.executable, "-c", code, str(tmp_path), server.url]
        child = subprocess.Popen(command, stdin=subprocess.PIPE)
        wait_for(lambda: server.received)
        child.stdin.close()
        assert child.wait() == -signal.SIGKILL
        wait_for(lambda: len(server.received) == 2)
    assert [sent["event"] for _, sent in server.received] == ["nan", "died"]


def test_a_server_that_fails_is_tried_again_and_one_that_refuses_is_not(monkeypatch):
    monkeypatch.setattr(webhook, "PAUSE", 0.01)
    with listening(500, 503) as server:
        webhook.post(server.url, {"text": "one"})
        assert len(server.received) == 3
    with listening(500, 500, 500, 500) as server, pytest.raises(RunError, match="HTTP 500"):
        webhook.post(server.url, {"text": "one"})
    with listening(404) as server:
        with pytest.raises(RunError) as error:
            webhook.post(server.url, {"text": "one"})
        assert len(server.received) == 1
    assert str(error.value) == "127.0.0.1 has not taken the message: HTTP 404"
    refused = (200, {"code": 19024, "msg": "Key Words Not Found"})
    with listening(refused) as server, pytest.raises(RunError, match=r"Not Found \(19024\)"):
        webhook.post(server.url, {"text": "one"})
    for url in ("not a url", "ftp//x", "http://[::1", "http://127.0.0.1:1/x"):
        with pytest.raises(RunError, match="not taken"):
            webhook.post(url, {"text": "one"})


def test_a_server_that_hangs_costs_a_bounded_time_and_is_said_once(tmp_path, monkeypatch, log):
    monkeypatch.setattr(launching, "FINISH", 1.5)
    with listening(*["hang"] * 9) as server:
        one = process(tmp_path, server.url)
        one.start()
        started = time.monotonic()
        finish([one], outcome="complete")
    assert time.monotonic() - started < 20  # of a machine under load
    assert [record.message for record in log.records if record.levelname == "WARNING"] == [
        "webhook: dropped: not finished within 2 seconds; metrics.jsonl has all figures"
    ]


def test_a_tracker_that_does_not_answer_or_raises_is_dropped_while_the_run_goes_on(
    tmp_path, monkeypatch, log
):
    monkeypatch.setattr(launching, "PATIENCE", 0.5)
    with listening(*["hang"] * 9) as server:
        hung = process(tmp_path, server.url)
        order = {"folder": str(tmp_path), "run_name": "one", "is_eager": True}
        gone = TrackerProcess("webhook", order)  # without a URL
        for one in (hung, gone):
            one.start()
            one.tell(event="nan", step=1)
        wait_for(lambda: hung.is_ended() and gone.is_ended())
        finish([hung, gone], outcome="complete")
    said = sorted(record.message for record in log.records if record.levelname == "WARNING")
    assert [text.split(";")[0] for text in said] == [
        "webhook: dropped: '_SUREFOOT_WEBHOOK_URL'",
        "webhook: dropped: it has not answered for 0 seconds",
    ]


def test_no_process_remains_if_the_user_does_not_wait(tmp_path, monkeypatch):
    with listening("hang") as server:
        one = process(tmp_path, server.url)
        one.start()
        pid = one.child.process.pid
        monkeypatch.setattr(launching.time, "sleep", interrupted)
        with pytest.raises(KeyboardInterrupt):
            finish([one], outcome="complete")
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def interrupted(_):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("hooks.slack.com", {"text": "hello"}),
        ("discord.com", {"content": "hello"}),
        ("open.feishu.cn", {"msg_type": "text", "content": {"text": "hello"}}),
        ("oapi.dingtalk.com", {"msgtype": "text", "text": {"content": "hello"}}),
    ],
)
def test_services_get_the_shape_that_they_take(host, expected):
    payload = {"text": "hello", "event": "complete"}
    assert webhook.shaped(f"https://{host}/x", payload) == expected
    assert webhook.shaped(f"https://{host}.evil.org/x", payload) == payload


def test_the_payload_is_strict_json():
    payload = webhook.payload_of("nan", RUN, {"step": 2, "loss": float("nan")})
    assert json.loads(json.dumps(payload, allow_nan=False))["loss"] is None
    assert "loss nan" in payload["text"]


def test_secrets_are_cut_out_of_texts(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    text = "key 0123456789abcdef at https://user:pass@host/x?a=1&api_key=zzz&b=2"
    assert redacted(text) == "key *** at https://***@host/x?a=1&api_key=***&b=2"
