"""A server in a thread of this process, on a free port."""

import contextlib
import json
import threading
import time

import httpx
import pytest
import uvicorn

from surefoot.plugins.serve.app import create_app
from surefoot.plugins.serve.models import ServeSettings
from surefoot.storage.web import bound


class Client:
    """Requests to a server, as bodies and answers."""

    def __init__(self, url, **options):
        self.url = url
        limits = httpx.Limits(max_connections=None)
        options = {"timeout": 60, "trust_env": False, "limits": limits, **options}
        self.http = httpx.Client(base_url=url, **options)

    def post(self, path, **body):
        found = self.http.post(path, json=body)
        is_json = "json" in found.headers.get("content-type", "")
        return found.status_code, found.json() if is_json else found.text

    def ok(self, path, **body):
        status, found = self.post(path, **body)
        assert status == 200, found
        return found

    def chat(self, text, **body):
        messages = text if isinstance(text, list) else [{"role": "user", "content": text}]
        return self.ok("/v1/chat/completions", messages=messages, **body)

    def chunks(self, path, **body):
        """The events of a stream; it must end in the last one that OpenAI sends."""
        with self.http.stream("POST", path, json={**body, "stream": True}) as found:
            assert found.status_code == 200, found.read()
            lines = [line for line in found.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    def figure(self, name):
        return self.http.get("/health").json()[name]

    def until(self, is_so, seconds=20):
        end = time.monotonic() + seconds
        while not is_so():
            assert time.monotonic() < end
            time.sleep(0.02)


@contextlib.contextmanager
def running(path, headers=None, **settings):
    """A client of a server of ``path``."""
    listener = bound("127.0.0.1", 0, "server")
    app = create_app(ServeSettings(path=str(path), **settings))
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    client = Client(f"http://127.0.0.1:{listener.getsockname()[1]}", headers=headers)
    try:
        yield client
    finally:
        client.http.close()
        server.should_exit = True
        thread.join(20)
        listener.close()
        assert not thread.is_alive()


def alike(found, expected):
    """Whether answers are the same up to roundings of their log-probabilities: what other requests
    may change. Their last bits depend on the processor."""
    if isinstance(expected, float):
        return found == pytest.approx(expected, rel=0, abs=1e-5)
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(alike(found[k], expected[k]) for k in found)
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(alike, found, expected))
    return found == expected
