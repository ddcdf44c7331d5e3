"""A download that was cut off and goes on, from servers that are not what they should be."""

import errno
import itertools
import os
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from surefoot.storage.files import File
from surefoot.storage.hubs import file_download as module
from surefoot.storage.hubs.file_download import HubError, RemoteFile, download

OLD, NEW = b"a" * 300_000, b"b" * 300_000
CUT = 200_000  # bytes after which the first answer ends


class Server(ThreadingHTTPServer):
    """Answers GET by a function of the request's headers and its number."""

    daemon_threads = True

    def handle_error(self, *_):
        pass  # a client that has left


@contextmanager
def serving(answer):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def do_GET(self):
            asked.append(dict(self.headers))
            assert len(asked) < 40, "requests without end"
            status, headers, body = answer(self.headers, len(asked))
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            for part in body:
                self.wfile.write(part)
            self.close_connection = True

    asked = []
    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/rows.jsonl", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(module, "WAIT", 0)
    for name in module.OFFLINE:
        monkeypatch.delenv(name, raising=False)


def whole(data, tag, end=None):
    headers = {"Content-Length": len(data)} | ({"ETag": tag} if tag else {})
    return 200, headers, [data[:end]]


def partial(data, tag, start, said=None):
    said = said or f"bytes {start}-{len(data) - 1}/{len(data)}"
    headers = {"Content-Length": len(data) - start, "Content-Range": said}
    return 206, headers | ({"ETag": tag} if tag else {}), [data[start:]]


def test_the_version_is_named_in_the_request_that_resumes(tmp_path):
    def answer(headers, number):
        if number == 1:
            return whole(OLD, '"old"', CUT)
        assert headers["Range"] == f"bytes={CUT}-"
        assert headers["If-Range"] == '"old"'
        return partial(OLD, '"old"', CUT)

    with serving(answer) as (url, asked):
        file = RemoteFile(url, len(OLD), tag='"old"')
        assert download(file, tmp_path / "rows").read_bytes() == OLD
    assert len(asked) == 2


@pytest.mark.parametrize("server", ["obeys", "ignores", "other bytes", "other length", "no tag"])
def test_no_file_is_half_of_each_of_two_versions(tmp_path, server):
    """The file is replaced by another of the same length while it is downloaded."""
    tag = None if server == "no tag" else '"old"'

    def answer(headers, number):
        if number == 1:
            return whole(OLD, tag, CUT)
        if "Range" not in headers or server == "obeys":
            return whole(NEW, '"new"')
        wrong = {"other bytes": f"bytes 0-{len(NEW) - 1}/{len(NEW)}", "other length": "bytes */9"}
        return partial(NEW, None if server in wrong else '"new"', CUT, wrong.get(server))

    with serving(answer) as (url, _):
        found = download(RemoteFile(url, len(OLD), tag=tag), tmp_path / "rows").read_bytes()
    assert found == NEW


def test_what_an_earlier_start_left_is_resumed_only_of_its_version(tmp_path):
    def answer(headers, _):
        if headers.get("If-Range") == '"old"':
            return partial(OLD, '"old"', CUT)
        return whole(NEW, '"new"')

    (tmp_path / "rows.part").write_bytes(OLD[:CUT])
    with serving(answer) as (url, _):
        file = RemoteFile(url, len(OLD), tag='"old"')
        assert download(file, tmp_path / "rows").read_bytes() == OLD
        (tmp_path / "rows.part").write_bytes(OLD[:CUT])
        assert download(RemoteFile(url, len(OLD)), tmp_path / "rows").read_bytes() == NEW


def test_a_range_that_is_always_refused_ends(tmp_path):
    def answer(headers, _):
        return (416, {"Content-Length": 0}, []) if "Range" in headers else whole(OLD, '"x"', CUT)

    with serving(answer) as (url, asked), pytest.raises(HubError, match="416"):
        download(RemoteFile(url, len(OLD), tag='"x"'), tmp_path / "rows")
    assert len(asked) < 12


def test_a_body_that_is_longer_than_its_file_is_not_followed(tmp_path):
    sent = []

    def endless():
        for _ in range(100_000):
            sent.append(1)
            yield OLD

    said = pytest.raises(HubError, match="bytes arrived, expected 300,000")
    with serving(lambda *_: (200, {}, endless())) as (url, _), said:
        download(RemoteFile(url, len(OLD)), tmp_path / "rows")
    assert len(sent) < 2000, "no more than what fits into buffers of the network"
    assert not list(tmp_path.iterdir())


def test_a_body_that_comes_byte_by_byte_is_not_followed_for_ever(tmp_path, monkeypatch):
    clock = itertools.count(0, 30)
    times = SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda _: None)
    monkeypatch.setattr(module, "time", times)
    said = pytest.raises(HubError, match=r"only .* bytes in 60 s|bytes are missing")
    body = itertools.repeat(b"x", 900)
    with serving(lambda *_: (200, {"Content-Length": 1000}, body)) as (url, asked), said:
        download(RemoteFile(url, 1000, tag='"x"'), tmp_path / "rows")
    assert len(asked) < 8


def test_a_redirect_to_a_file_or_to_ftp_is_not_followed(tmp_path):
    for target in ("ftp://127.0.0.1:9/x", "file:///etc/hostname"):
        redirect = (302, {"Location": target, "Content-Length": 0}, [])
        said = pytest.raises(HubError, match=r"a redirect to no web address|not allowed")
        with serving(lambda *_, redirect=redirect: redirect) as (url, _), said:
            download(RemoteFile(url), tmp_path / "rows")


def test_a_disk_that_takes_no_more_is_said_as_what_it_is(tmp_path, monkeypatch):
    def full(self, *_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    monkeypatch.setattr(File, "write_at", full)
    said = pytest.raises(HubError, match=r"cannot write .*rows.part: the disk is full")
    with serving(lambda *_: whole(OLD, '"x"')) as (url, asked), said:
        download(RemoteFile(url, len(OLD)), tmp_path / "rows")
    assert len(asked) == 1
