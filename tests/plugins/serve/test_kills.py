"""Clients and servers that are killed, or stop reading, in the middle of an answer."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from folders import save_model
from surefoot.plugins.serve import responses as streaming
from surefoot.plugins.serve.engine import EngineThread

from .running import Client, running

TEXT = "/v1/completions"
ASKED = b'{"prompt": "x", "max_tokens": 200, "ignore_eos": true, "n": 24, "stream": true%s}'
READER = """\
import socket, sys, time
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as connection:
    connection.sendall(sys.argv[2].encode())
    while b"data:" not in (data := connection.recv(4096)):
        assert data, "the server has ended its answer"
    print("reads", flush=True)
    while connection.recv(4096):
        pass
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("kills") / "base")


def raw(body, path=TEXT):
    """A request as bytes."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body


def port_of(client):
    return int(client.url.rpartition(":")[2])


def is_free(client):
    names = ("running", "waiting", "open")
    return not any(client.figure(f"responses_{name}") for name in names)


def test_a_client_that_is_killed_frees_its_slots(folder):
    with running(folder, max_batch=8) as client:
        asked = raw(ASKED.replace(b'"n": 24', b'"n": 128') % b"").decode()  # seconds of work
        command = [sys.executable, "-c", READER, str(port_of(client)), asked]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as reader:
            assert reader.stdout.readline() == "reads\n"
            assert 0 < client.figure("responses_open") <= 128
            os.kill(reader.pid, signal.SIGKILL)
        client.until(lambda: is_free(client))
        made = client.figure("generated_tokens")
        assert made < 128 * 200
        found = client.ok(TEXT, prompt="x", max_tokens=4, ignore_eos=True)
        assert client.figure("generated_tokens") == made + 4
        assert found["usage"]["completion_tokens"] == 4


def test_a_client_that_stops_reading_frees_its_slots(folder, monkeypatch, caplog):
    monkeypatch.setattr(streaming, "SECONDS_TO_READ", 0.5)
    with running(folder, max_batch=32) as client, socket.socket() as silent:
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        silent.connect(("127.0.0.1", port_of(client)))
        silent.sendall(raw(ASKED % b', "logprobs": 20'))  # 10 MB, more than sockets hold
        client.until(lambda: client.figure("responses_open") == 24)
        client.until(lambda: is_free(client), seconds=60)
        assert "was not read" in caplog.text
        assert client.ok(TEXT, prompt="x", max_tokens=4)


def test_work_that_is_cancelled_before_its_turn_is_not_done_and_the_engine_goes_on():
    async def found():
        engine = EngineThread()
        engine.start(asyncio.get_running_loop())
        is_begun, may_end, done = threading.Event(), threading.Event(), []

        def slow():
            is_begun.set()
            may_end.wait(20)

        running_one = asyncio.wrap_future(engine.call(slow))
        await asyncio.to_thread(is_begun.wait, 20)
        waiting = engine.call(lambda: done.append("cancelled"))
        for cancelled in (running_one, waiting):
            assert cancelled.cancel()
        may_end.set()
        last = engine.call(lambda: done.append("last"))
        await asyncio.wait_for(asyncio.wrap_future(last), 20)
        await asyncio.to_thread(engine.close)
        return done

    assert asyncio.run(found()) == ["last"]


@pytest.fixture
def stack():
    with contextlib.ExitStack() as made:
        yield made


@contextlib.contextmanager
def served(folder, port, log):
    """A server in a process of its own."""
    command = [sys.executable, "-m", "surefoot", "serve", str(folder), "--port", str(port)]
    with log.open("w") as output, subprocess.Popen(command, stdout=output, stderr=output) as server:
        try:
            yield server
        finally:
            server.kill()


@pytest.mark.proof
def test_openais_clients_get_their_answers_of_a_server_that_is_killed_and_started_again(
    folder, tmp_path, stack
):
    openai = pytest.importorskip("openai")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    body = {"model": "base", "prompt": "x", "max_tokens": 150, "temperature": 1}
    more = {"extra_body": {"ignore_eos": True}}
    client = Client(f"http://127.0.0.1:{port}")
    settings = {"base_url": f"{client.url}/v1", "api_key": "none", "max_retries": 40}
    official = stack.enter_context(openai.OpenAI(**settings))
    stack.enter_context(client.http)

    def asked(seed):
        return official.completions.create(**body, **more, seed=seed)

    def is_up():
        with contextlib.suppress(Exception):
            return client.http.get("/health").status_code == 200
        return False

    with served(folder, port, tmp_path / "first") as first:
        client.until(is_up, seconds=120)
        expected = [asked(seed).choices[0].text for seed in range(6)]
        with ThreadPoolExecutor(6) as pool:
            answers = [pool.submit(asked, seed) for seed in range(6)]
            client.until(lambda: client.figure("responses_running") > 0)
            os.kill(first.pid, signal.SIGKILL)
            first.wait()
            time.sleep(1)
            with served(folder, port, tmp_path / "second") as second:
                found = [answer.result() for answer in answers]
                assert [one.choices[0].text for one in found] == expected
                client.until(lambda: is_free(client))
                assert client.figure("generated_tokens") > 0
                second.terminate()
                assert second.wait(60) in (0, -signal.SIGTERM)
