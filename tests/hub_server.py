"""A small server that speaks the protocols of the Hugging Face hub and of ModelScope, and serves
plain files. It can drop a connection in the middle of a file, and send damaged bytes."""

import hashlib
import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from hub_uploads import LARGE, Uploads, content_id, git_hash

COMMIT = "a" * 40


class Hub:
    """Repositories by (kind, name): ``models`` or ``datasets``, each with its files."""

    def __init__(self):
        self.repositories = {}
        self.served = []  # (path of the file, first byte) of each answer with a body
        self.drops = {}  # file -> bytes after which its connection is closed, once each
        self.damaged = {}  # file -> how many answers have a wrong byte
        self.slow = set()  # files that are served a little at a time
        self.asked = []  # every request
        self.needs_token = False
        self.refuses_head = False
        self.refuses_uploads = None  # the reason
        self.secrets = []  # the Authorization of each request for a plain file
        self.private = {}  # (kind, name) -> whether it is
        self.blobs = {}  # sha256 -> content that was uploaded, of a commit or not
        self.received = []  # (sha256, bytes that arrived) of each upload
        self.cuts = []  # after how many bytes the next uploads are cut off
        self.lost_answers = 0  # commits that are made, but whose answer is lost
        self.commits = []  # the paths of each commit

    def find(self, kind, name):
        return self.repositories.get((kind, name))


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def size_of(data, name):
    """The size of a file as the hub tells it; of a large one with its sha256, as ``name``."""
    large = {"lfs": {"size": len(data), name: sha256(data), "pointerSize": 100}}
    return {"size": len(data), **(large if len(data) > LARGE else {})}


class _Handler(Uploads, BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        if self.server.hub.refuses_head:
            return self.answer_json({}, 403)
        return self.do_GET(body=False)

    def do_GET(self, *, body=True):
        hub, url = self.server.hub, urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        parts = url.path.strip("/").split("/")
        hub.asked.append(f"{self.command} {self.path}")
        if hub.needs_token and "secret" not in self.headers.get("Authorization", ""):
            return self.answer_json({"Message": "no"}, 401)
        if parts[:2] == ["api", "v1"]:
            return self.modelscope(parts[2:], query, body)
        if parts[0] == "api":
            return self.huggingface(parts[1:])
        if "resolve" in parts:
            return self.resolve(parts, body)
        if parts[0] == "moved":
            hub.secrets.append(self.headers.get("Authorization"))
            self.send_response(302)
            host = self.headers["Host"].replace("127.0.0.1", "localhost")
            self.send_header("Location", f"http://{host}/{parts[-1]}")
            self.send_header("Content-Length", "0")
            return self.end_headers()
        found = hub.find("files", parts[-1])
        hub.secrets.append(self.headers.get("Authorization"))
        return self.answer_file(parts[-1], found, {}, body) if found else self.absent()

    def modelscope(self, parts, query, body):
        kind, name = parts[0], "/".join(parts[1:3])
        found = self.server.hub.find(kind, name)
        if found is None:
            return self.answer_json({"Code": 10010205001, "Success": False}, 404)
        if parts[3:] in (["repo", "files"], ["repo", "tree"]):
            listed = [
                {"Path": path, "Type": "blob", "Size": len(data), "Sha256": sha256(data)}
                for path, data in sorted(found.items())
            ] + [{"Path": "folder", "Type": "tree", "Size": 0}]
            page, size = int(query.get("PageNumber", 1)), int(query.get("PageSize", 10**6))
            files = listed[(page - 1) * size : page * size]
            return self.answer_json({"Code": 200, "Success": True, "Data": {"Files": files}})
        path = query["FilePath"]
        return self.answer_file(path, found[path], {}, body) if path in found else self.absent()

    def huggingface(self, parts):
        kind, name = parts[0], "/".join(parts[1:3])
        found = self.server.hub.find(kind, name)
        if found is None:
            return self.answer_json({"error": "Repository not found"}, 404, "RepoNotFound")
        if "tree" in parts:
            below = "/".join(parts[5:])
            files = [(path, data) for path, data in found.items() if path.startswith(below)]
            return self.answer_json(
                [
                    {"type": "file", "path": path, "oid": git_hash(data), **size_of(data, "oid")}
                    for path, data in files
                ]
            )
        siblings = [
            {"rfilename": path, "blobId": git_hash(data), **size_of(data, "sha256")}
            for path, data in found.items()
        ]
        is_private = self.server.hub.private.get((kind, name), False)
        about = {"id": name, "sha": COMMIT, "siblings": siblings, "private": is_private}
        return self.answer_json({**about, "tags": [], "gated": False, "downloads": 0, "likes": 0})

    def resolve(self, parts, body):
        at = parts.index("resolve")
        kind = "datasets" if parts[0] == "datasets" else "models"
        name, path = "/".join(parts[at - 2 : at]), "/".join(parts[at + 2 :])
        found = self.server.hub.find(kind, name)
        if found is None or path not in found:
            return self.answer_json({"error": "no"}, 404, "EntryNotFound")
        digest = content_id(found[path])
        headers = {"ETag": f'"{digest}"', "X-Repo-Commit": COMMIT}
        return self.answer_file(path, found[path], headers, body)

    def absent(self):
        self.answer_json({}, 404)

    def answer_json(self, value, status=200, code=None):
        data = json.dumps(value).encode()
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def answer_file(self, name, data, headers, body):
        hub, start = self.server.hub, 0
        if wanted := self.headers.get("Range"):
            start = int(wanted.removeprefix("bytes=").partition("-")[0])
        self.send_response(206 if start else 200)
        for key, value in {"ETag": f'"{sha256(data)}"', **headers}.items():
            self.send_header(key, value)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        if not body:
            return
        hub.served.append((name, start))
        if hub.damaged.get(name, 0):
            hub.damaged[name] -= 1
            data = data[:-1] + bytes([data[-1] ^ 1])
        limit = hub.drops.pop(name, None)
        part = data[start:] if limit is None else data[start:limit]
        step = 1 << 18 if name in hub.slow else 1 << 30
        for at in range(0, len(part), step):
            self.wfile.write(part[at : at + step])
            self.wfile.flush()
            time.sleep(0.02 if name in hub.slow else 0)
        if limit is not None:
            self.close_connection = True


@contextmanager
def serving():
    """A hub and its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads, server.hub = True, Hub()
    server.handle_error = lambda *_: None  # a client that was killed
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.hub, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
