"""A real S3 server that can be told to fail, and its buckets."""

import http.client
import logging
import os
import re
import socket
import threading
import uuid
import warnings

OURS = "HTTP_X_TEST"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


def request(port, method, path, body=b""):
    """One plain request to the server; its answer's body. Again, if the server fails: it may, where
    others delete what it lists."""
    headers = {
        "Authorization": "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request",
        "X-Test": "1",
    }
    for _ in range(5):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        answer = response.read()
        connection.close()
        if response.status < 500:
            break
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
        pattern = r"checkpoint-(\d+)(?:\.launch-\d+)?/manifest.json"
        found = [re.fullmatch(pattern, key) for key in self.names()]
        return sorted(int(match[1]) for match in found if match)

    def download(self, folder):
        """As ``aws s3 cp --recursive`` does."""
        for key in self.names():
            (folder / key).parent.mkdir(parents=True, exist_ok=True)
            (folder / key).write_bytes(self.get(key))


def not_of_the_gateway(environ):
    """Why Hugging Face's gateway to its buckets (s3.hf.co) refuses a request; None: it does not.
    Its rules as announced: path style, no trailing checksums, ListObjectsV2 only, no metadata of
    users, conditions on PutObject alone. And it is asked for no length before a content."""
    method, path, query = (environ[key] for key in ("REQUEST_METHOD", "PATH_INFO", "QUERY_STRING"))
    is_object = path.strip("/").count("/") > 0
    headers = {key.removeprefix("HTTP_").lower(): value for key, value in environ.items()}
    names = " ".join(headers)
    streams = headers.get("content_encoding", "") + headers.get("x_amz_content_sha256", "")
    has_condition = "if_match" in headers or "if_none_match" in headers
    reasons = {
        "virtual host style": not headers["host"].startswith("127.0.0.1"),
        "a checksum": "x_amz_checksum" in names or "x_amz_trailer" in names,
        "a body in chunks": "aws-chunked" in streams or "STREAMING" in streams,
        "metadata": "x_amz_meta" in names,
        "ListObjects": method == "GET" and not is_object and "list-type=2" not in query,
        "a condition": has_condition and not (method == "PUT" and "uploadId" not in query),
        "HEAD of a file": method == "HEAD" and path.endswith((".json", ".jsonl", ".yaml")),
    }
    return next((why for why, is_so in reasons.items() if is_so), None)


def refused(environ, start_response, status, code):
    """The answer of a server that refuses a request, with S3's name for why."""
    environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    start_response(f"{status} No", [("Content-Type", "application/xml")])
    body = f"<Error><Code>{code}</Code><Message>no</Message></Error>"
    return [] if environ["REQUEST_METHOD"] == "HEAD" else [body.encode()]


class Server:
    """A real S3 server in a thread; ``rule(method, path, count)`` says what goes wrong.

    It is asked for every request but those of ``request``, and answers None, ``"drop"`` (the
    connection ends when half of the request's body has come), ``"deaf"`` (the server does it, but
    its answer is lost), a status such as 503, or a status with S3's name of the error.
    """

    def __init__(self):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from moto.moto_server.werkzeug_app import (
                DomainDispatcherApplication,
                create_backend_app,
            )
            from werkzeug.serving import make_server
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._s3 = DomainDispatcherApplication(create_backend_app)
        self._http = make_server("127.0.0.1", 0, self._answer, threaded=True)
        self.port = self._http.server_port
        self.is_well()
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def is_well(self):
        """Nothing goes wrong from now on."""
        self.rule, self.count = lambda method, path, count: None, 0
        self.is_strict, self.refused = False, []
        self.cannot_copy, self.copied = False, []

    def close(self):
        self._http.shutdown()
        self._http.server_close()

    def _answer(self, environ, start_response):
        if OURS in environ:
            return self._s3(environ, start_response)
        self.count += 1
        if "HTTP_X_AMZ_COPY_SOURCE" in environ:
            self.copied.append(environ["PATH_INFO"])
        if self.cannot_copy and "HTTP_X_AMZ_COPY_SOURCE" in environ:
            return refused(environ, start_response, 501, "NotImplemented")
        if self.is_strict and (why := not_of_the_gateway(environ)):
            self.refused.append((environ["REQUEST_METHOD"], environ["PATH_INFO"], why))
            return refused(environ, start_response, 501, "NotImplemented")
        fault = self.rule(environ["REQUEST_METHOD"], environ["PATH_INFO"], self.count)
        if isinstance(fault, tuple):
            return refused(environ, start_response, *fault)
        if fault is None or fault == "deaf":
            answer = self._s3(environ, start_response)
            if fault is None:
                return answer
        else:
            is_chunked = environ.get("wsgi.input_terminated")
            length = -1 if is_chunked else int(environ.get("CONTENT_LENGTH") or 0)
            environ["wsgi.input"].read(length // 2 if fault == "drop" and length > 0 else length)
            start_response(f"{fault if isinstance(fault, int) else 500} No", [])
        if not isinstance(fault, int):
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
        return []


def point_at(monkeypatch, port):
    """Let S3 mean the server at ``port``, for this process and those it starts."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    os.environ.pop("http_proxy", None)
