"""A webhook: messages when a launch ends or fails, when its process dies, and at the first NaN.

Its URL is a password: it comes from an environment variable, and is written nowhere.
"""

from __future__ import annotations

import json
import math
import os
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from ...errors import RunError
from ._tracker_services import Facts, TrackedRun

TRIES, PAUSE, SECONDS = 3, 1.0, 8.0  # all within the time that a launch waits for its trackers
_MOST_ANSWER = 1 << 16
Payload = dict[str, object]
# By the end of a host's name: what it takes instead of the payload.
SHAPES: Mapping[str, Callable[[object], Payload]] = {
    "hooks.slack.com": lambda text: {"text": text},
    "discord.com": lambda text: {"content": text},
    "open.feishu.cn": lambda text: {"msg_type": "text", "content": {"text": text}},
    "open.larksuite.com": lambda text: {"msg_type": "text", "content": {"text": text}},
    "oapi.dingtalk.com": lambda text: {"msgtype": "text", "text": {"content": text}},
    "qyapi.weixin.qq.com": lambda text: {"msgtype": "text", "text": {"content": text}},
}
_WORDS = {
    "complete": "is complete",
    "stopped": "was stopped and has saved",
    "failed": "has failed",
    "died": "has died: its process is gone and has said nothing",
    "nan": "has had a loss or gradient that is NaN or infinite",
}


@dataclass
class Webhook:
    """Keeps the last record of the run, and sends it with each event."""

    url: str
    tracked: TrackedRun
    last: dict[str, object] = field(default_factory=dict)
    missed: list[str] = field(default_factory=list)  # events that were not taken

    @property
    def place(self) -> str:
        """The host alone: the rest of such a URL is a password."""
        return f"messages to {_host(self.url)}"

    def log(self, record: Mapping[str, float], step: int, line: int) -> None:
        """Remember the record."""
        self.last |= {"step": step, **{n: v for n, v in record.items() if n.endswith("loss")}}

    def event(self, name: str, facts: Facts) -> None:
        """Send it; what was not taken is part of the last message."""
        try:
            self._send(name, facts)
        except RunError:
            self.missed.append(name)

    def finish(self, outcome: str, facts: Facts) -> None:
        """Send how the launch has ended."""
        self._send(outcome, {**facts, "missed": self.missed} if self.missed else facts)

    def _send(self, name: str, facts: Facts) -> None:
        post(self.url, payload_of(name, self.tracked, {**self.last, **facts}))


def webhook(tracked: TrackedRun) -> Webhook:
    """The URL is that of the environment."""
    return Webhook(os.environ["_SUREFOOT_WEBHOOK_URL"], tracked)


def payload_of(name: str, tracked: TrackedRun, facts: Facts) -> Payload:
    """What is sent: facts by name, and one text for people."""
    text = f"{tracked.name} {_WORDS[name]}"
    if "step" in facts:
        text += f", step {facts['step']}"
    losses = [f"{n} {v:.4g}" for n, v in facts.items() if isinstance(v, float) and "loss" in n]
    text += "".join(f", {loss}" for loss in losses[:2])
    if facts.get("error"):
        text += f": {facts['error']}"
    where = {"run": tracked.name, "folder": str(tracked.folder), "host": socket.gethostname()}
    json_facts = {
        n: None if isinstance(v, float) and not math.isfinite(v) else v for n, v in facts.items()
    }
    return {"event": name, **where, "time": time.time(), **json_facts, "text": text}


def post(url: str, payload: Payload) -> None:
    """Send ``payload`` in the shape that the host takes. Raises ``RunError`` without the URL."""
    data = json.dumps(shaped(url, payload)).encode()
    for number in range(TRIES):
        time.sleep(PAUSE * number)
        problem, is_final = _tried(url, data)
        if is_final:
            break
    if problem:
        raise RunError(f"{_host(url)} has not taken the message: {problem}")


def shaped(url: str, payload: Payload) -> Payload:
    """``payload`` as the host of ``url`` takes it."""
    host = _host(url)
    for end, shape in SHAPES.items():
        if host == end or host.endswith(f".{end}"):
            return shape(payload["text"])
    return payload


def _host(url: str) -> str:
    try:
        return urlsplit(url).hostname or "the webhook"
    except ValueError:
        return "the webhook"


def _tried(url: str, data: bytes) -> tuple[str, bool]:
    """What went wrong, or nothing; and whether trying again is useless."""
    headers = {"Content-Type": "application/json", "User-Agent": "surefoot"}
    try:
        request = urllib.request.Request(url, data, headers)
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            return _complaint(answer.read(_MOST_ANSWER)), True
    except urllib.error.HTTPError as error:
        return f"HTTP {error.code}", error.code < 500 and error.code not in (408, 429)
    except OSError as error:
        return str(getattr(error, "reason", None) or error), False
    except ValueError:  # its text would repeat the URL
        return "the URL is not one", True


def _complaint(body: bytes) -> str:
    """Feishu, DingTalk and WeCom answer 200 with a code of their own."""
    try:
        answer = json.loads(body)
    except ValueError:
        return ""
    answer = answer if isinstance(answer, dict) else {}
    code = answer.get("errcode") or answer.get("code")
    if isinstance(code, int) and code:
        return f"{answer.get('errmsg') or answer.get('msg')} ({code})"
    return ""
