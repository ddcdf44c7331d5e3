"""A real S3 server in a process of its own, and a proxy before it that can be told to fail."""

import contextlib
import http.client
import os
import re
import socket
import subprocess
import sys
import threading
import time
import uuid
from importlib.util import find_spec

import pytest

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextlib.contextmanager
def moto():
    """The port of a new, empty S3 server."""
    if find_spec("moto") is None or find_spec("s3fs") is None or find_spec("flask") is None:
        pytest.skip("needs moto[server] and s3fs: pip install 'surefoot[dev]'")
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        for _ in range(300):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.1)
        yield port
    finally:
        process.kill()
        process.wait()


def request(port, method, path, body=b""):
    """One plain request to the server; its answer's body."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    headers = {
        "Authorization": "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request"
    }
    connection.request(method, path, body, headers)
    answer = connection.getresponse().read()
    connection.close()
    return answer


class Bucket:
    """A bucket of its own for a test, seen without any code of ours."""

    def __init__(self, port):
        self.port = port
        self.name = f"b{uuid.uuid4().hex[:10]}"
        request(port, "PUT", f"/{self.name}")

    @property
    def url(self):
        return f"s3://{self.name}/runs/tiny"

    def names(self):
        """Every object below the run, by its name in it."""
        text = request(self.port, "GET", f"/{self.name}?list-type=2&max-keys=1000").decode()
        return [key.removeprefix("runs/tiny/") for key in re.findall(r"<Key>(.*?)</Key>", text)]

    def get(self, key):
        return request(self.port, "GET", f"/{self.name}/runs/tiny/{key}")

    def put(self, key, data):
        request(self.port, "PUT", f"/{self.name}/runs/tiny/{key}", data)

    def delete(self, key):
        request(self.port, "DELETE", f"/{self.name}/runs/tiny/{key}")

    def committed(self):
        found = [re.fullmatch(r"checkpoint-(\d+)/manifest.json", key) for key in self.names()]
        return sorted(int(match[1]) for match in found if match)

    def download(self, folder):
        """As ``aws s3 cp --recursive`` does."""
        for key in self.names():
            (folder / key).parent.mkdir(parents=True, exist_ok=True)
            (folder / key).write_bytes(self.get(key))


class Proxy:
    """Hands connections on to the server; ``rule(method, path, count)`` says what goes wrong.

    It is asked for every request, and answers None, ``"drop"`` (the connection ends when half of
    the request's body has come), ``"deaf"`` (the server does it, but its answer is lost), or a
    status such as 503.
    """

    def __init__(self, port):
        self.server = port
        self.rule = lambda method, path, count: None
        self.seen = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self):
        self._socket.close()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._socket.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client):
        with client, contextlib.suppress(OSError, ConnectionError):
            stream = client.makefile("rb")
            while head := self._head(stream):
                first, headers = head
                method, path, _ = first.split(" ", 2)
                self.seen.append((method, path))
                fault = self.rule(method, path, len(self.seen))
                if "100-continue" in headers.get("expect", ""):
                    client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
                body = self._body(stream, headers, half=fault == "drop")
                if fault == "drop":
                    client.shutdown(socket.SHUT_RDWR)
                    return
                if isinstance(fault, int):
                    client.sendall(f"HTTP/1.1 {fault} No\r\nContent-Length: 0\r\n\r\n".encode())
                    continue
                answer = self._ask(method, path, headers, body)
                if fault == "deaf":
                    client.shutdown(socket.SHUT_RDWR)
                    return
                client.sendall(answer)

    @staticmethod
    def _head(stream):
        first = stream.readline().decode().strip()
        if not first:
            return None
        headers = {}
        while line := stream.readline().decode().strip():
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        return first, headers

    @staticmethod
    def _body(stream, headers, *, half):
        if "chunked" in headers.get("transfer-encoding", ""):
            data = b""
            while size := int(stream.readline().split(b";")[0], 16):
                data += stream.read(size)
                stream.readline()
                if half:
                    return data
            while stream.readline().strip():
                pass
            return data
        length = int(headers.get("content-length", 0))
        return stream.read(length // 2 if half else length)

    def _ask(self, method, path, headers, body):
        connection = http.client.HTTPConnection("127.0.0.1", self.server, timeout=60)
        drop = ("transfer-encoding", "content-length", "expect", "connection")
        sent = {name: value for name, value in headers.items() if name not in drop}
        connection.request(method, path, body or None, sent)
        got = connection.getresponse()
        data = got.read()
        connection.close()
        lines = [f"HTTP/1.1 {got.status} {got.reason}"]
        lines += [
            f"{name}: {value}"
            for name, value in got.getheaders()
            if name.lower() not in ("transfer-encoding", "connection", "content-length")
        ]
        length = got.getheader("content-length") if method == "HEAD" else len(data)
        lines += [f"Content-Length: {length or 0}", "", ""]
        return "\r\n".join(lines).encode() + data


def point_at(monkeypatch, port):
    """Let S3 mean the server at ``port``, for this process and those it starts."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    os.environ.pop("http_proxy", None)
