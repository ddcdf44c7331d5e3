import contextlib
import json
import socket
import time

import httpx2
import pytest
from starlette.testclient import TestClient

from surefoot.plugins.board.app import MAX_BODY, MAX_REQUESTS, create_app
from surefoot.plugins.board.run_folders import OutsideRootError, inside, new_inside
from surefoot.storage import web
from surefoot.storage.web import hosts_of

from .runs import COMPLETE, write_run
from .serving import served

OWN = "http://127.0.0.1:7860"
MINE = {"X-Surefoot": "1"}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    top = tmp_path_factory.mktemp("top")
    write_run(top / "root/run", end=COMPLETE)
    write_run(top / "outside/secret", end=COMPLETE)
    (top / "root/link").symlink_to(top / "outside/secret")
    (top / "root/run/leak.yaml").symlink_to(top / "outside/secret/recipe.yaml")
    return top / "root"


@pytest.fixture(scope="module")
def board(root):
    with TestClient(create_app(root), base_url=OWN) as client:
        yield client


@pytest.fixture(scope="module")
def open_board(root):
    """One that others reach, with a token."""
    hosts = hosts_of("0.0.0.0", ["gpu-7"])
    app = create_app(root, token="a-long-secret", hosts=hosts)
    with TestClient(app, base_url="http://gpu-7:7860", follow_redirects=False) as client:
        yield client


@pytest.mark.parametrize(
    "headers",
    [
        {},  # a form can post, but cannot set this header
        {**MINE, "Origin": "https://evil.example"},
        {**MINE, "Origin": "null"},
        {**MINE, "Origin": "http://["},
        {**MINE, "Origin": "ftp://127.0.0.1:7860"},
        {**MINE, "Origin": "http://127.0.0.1:8000"},
        {**MINE, "Sec-Fetch-Site": "cross-site"},
        {**MINE, "Sec-Fetch-Site": "same-site"},
    ],
)
def test_other_pages_change_nothing(board, headers):
    for path in ("/api/check", "/api/start", "/api/stop?run=run", "/api/pin", "/api/chat"):
        assert board.post(path, json={"text": "a: 1"}, headers=headers).status_code == 403, path


def test_the_boards_own_page_and_a_script_may(board):
    for headers in (MINE, {**MINE, "Origin": OWN, "Sec-Fetch-Site": "same-origin"}):
        assert board.post("/api/check", json={"text": "a: 1"}, headers=headers).status_code == 200


@pytest.mark.parametrize(
    "name",
    [
        "..",
        "../outside/secret",
        "/etc",
        "link",
        "run/../../outside/secret",
        "run/\0",
        "a" * 5000,
        "~root",
    ],
)
def test_no_path_leaves_the_root(board, root, name):
    for path in ("run", "series", "log", "checkpoints"):
        answer = board.get(f"/api/{path}", params={"run": name, "names": "loss"})
        assert answer.status_code in (404, 422), path
    with pytest.raises((OutsideRootError, OSError)):
        inside(root, name)
    body = {"text": "a", "file": name}
    assert board.post("/api/start", json=body, headers=MINE).status_code in (404, 409, 422)


def test_links_out_of_the_root_are_not_followed(board):
    assert [row["run"] for row in board.get("/api/runs").json()["runs"]] == ["run"]
    assert board.get("/api/recipe", params={"file": "run/leak.yaml"}).status_code == 404
    for file in ("../outside/secret/recipe.yaml", "recipe.yaml", "leak.yaml"):
        found = board.get("/api/samples", params={"run": "run", "file": file}).json()
        assert found["rows"] == []


def test_new_folders_are_inside_and_new(root):
    assert new_inside(root, "exports/a") == root / "exports/a"
    for name in ("run", "../a", "link/a", ".", ""):
        with pytest.raises(OutsideRootError):
            new_inside(root, name)


@pytest.mark.parametrize(
    "path",
    [
        "/static/../app.py",
        "/static/%2e%2e/app.py",
        "/static/..%2fsecurity.py",
        "/static//etc/passwd",
    ],
)
def test_only_the_pages_own_files_are_served(board, path):
    assert board.get(path).status_code == 404


def test_large_and_strange_bodies_are_refused(board):
    def post(body, **headers):
        sent = {**MINE, "Content-Type": "application/json", **headers}
        return board.post("/api/check", content=body, headers=sent).status_code

    assert post(b"x" * (MAX_BODY + 1)) == 413
    assert post(b"{}", **{"Content-Length": "-1"}) == 400
    assert post(json.dumps({"text": "a: 1", "more": 1})) == 422
    assert post(b"[" * 100_000) in (400, 422)
    bomb = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(9)
    )
    found = board.post("/api/check", json={"text": bomb}, headers=MINE).json()
    assert "far beyond what a recipe needs" in found["problems"][0]["message"]


def test_a_body_in_chunks_is_limited_as_well(board):
    chunks = (b"x" * 100_000 for _ in range(20))
    headers = {**MINE, "Content-Type": "application/json"}
    assert board.post("/api/check", content=chunks, headers=headers).status_code >= 400


def test_nothing_is_shown_to_others_without_the_token(open_board):
    for path in ("/", "/api/runs", "/static/app.js", "/?token=wrong", "/?token="):
        assert open_board.get(path).status_code == 401, path
    assert open_board.post("/api/check", json={"text": ""}, headers=MINE).status_code == 401
    bearer = {"Authorization": "Bearer a-long-secret"}
    assert open_board.get("/api/runs", headers=bearer).status_code == 200


def test_the_token_becomes_a_cookie_that_no_script_and_no_other_site_has(open_board):
    answer = open_board.get("/?token=a-long-secret")
    assert (answer.status_code, answer.headers["location"]) == (303, "./")
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert open_board.get("/api/runs").status_code == 200
    foreign = {**MINE, "Origin": "http://evil.example"}
    assert open_board.post("/api/check", json={"text": ""}, headers=foreign).status_code == 403
    open_board.cookies.clear()


def test_every_answer_forbids_frames_and_foreign_scripts(board):
    for path in ("/", "/api/runs", "/api/run?run=..", "/static/app.js", "/nothing"):
        headers = board.get(path).headers
        assert headers["x-frame-options"] == "DENY"
        assert headers["x-content-type-options"] == "nosniff"
        assert "default-src 'none'" in headers["content-security-policy"]


def test_a_read_only_board_starts_writes_and_deletes_nothing(root):
    with TestClient(create_app(root, is_read_only=True), base_url=OWN, headers=MINE) as client:
        assert client.get("/api/board").json()["is_read_only"]
        assert client.get("/api/runs").json()["runs"]
        assert client.post("/api/check", json={"text": "a: 1"}).status_code == 200
        for path in REFUSED:
            answer = client.post(f"{path}?run=run&number=1", json={"run": "run"})
            assert (answer.status_code, "read-only" in answer.text) == (403, True), path
            other = client.request("DELETE", path)
            assert other.status_code == 403
    assert not (root / "run/pinned.json").exists()


REFUSED = [f"/api/{name}" for name in ("start", "try", "stop", "resume", "pin", "cancel")]
REFUSED += ["/api/checkpoints", "/api/chat", "/api/chat/close"]


def test_other_pages_cannot_keep_the_board_busy_and_a_link_to_it_opens(board):
    for site in ("cross-site", "same-site"):
        headers = {"Sec-Fetch-Site": site}
        assert board.get("/api/runs", headers=headers).status_code == 403
        assert board.get("/", headers=headers).status_code == 200
    assert board.get("/api/runs", headers={"Sec-Fetch-Site": "none"}).status_code == 200


def test_too_many_requests_are_refused_for_a_while(root):
    app = create_app(root)
    with TestClient(app, base_url=OWN) as client:
        app.recent.extend([time.monotonic()] * (MAX_REQUESTS - 1))
        assert [client.get("/api/board").status_code for _ in range(2)] == [200, 429]
        app.recent.clear()
        app.recent.extend([time.monotonic() - 60] * MAX_REQUESTS)
        assert client.get("/api/board").status_code == 200


def test_visitors_without_the_token_cost_the_owner_nothing(root):
    app = create_app(root, token="a-long-secret", hosts=hosts_of("0.0.0.0", ["gpu-7"]))
    with TestClient(app, base_url="http://gpu-7:7860") as client:
        refused = [{}, {"Host": "evil.example"}, {"Sec-Fetch-Site": "cross-site"}]
        for headers in (*refused, {"Authorization": "Bearer wrong"}):
            codes = {
                client.get("/api/board", headers=headers).status_code
                for _ in range(MAX_REQUESTS // 3)
            }
            assert codes <= {401, 403, 421}
        assert not app.recent
        owner = {"Authorization": "Bearer a-long-secret"}
        assert client.get("/api/board", headers=owner).status_code == 200


def asks(port, count=1):
    """Connections that have begun a request, and do not end it."""
    found = [socket.create_connection(("127.0.0.1", port), timeout=30) for _ in range(count)]
    for one in found:
        one.sendall(b"GET /api/board HTTP/1.1\r\nHost: 127.0.0.1\r\nX-A: ")
    return found


def test_connections_that_ask_nothing_make_room_for_the_owner(root, monkeypatch):
    monkeypatch.setattr(web, "MOST_WAITING", 8)
    with served(create_app(root)) as port, contextlib.ExitStack() as stack:
        for one in asks(port, 40):
            stack.callback(one.close)
        for _ in range(3):
            assert httpx2.get(f"http://127.0.0.1:{port}/api/board", timeout=120).status_code == 200


def test_headers_that_never_end_are_not_waited_for(root, monkeypatch):
    monkeypatch.setattr(web, "SECONDS_FOR_HEADERS", 0.2)
    with served(create_app(root)) as port:
        (slow,) = asks(port)
        with slow:
            assert slow.recv(1) == b"", "the server has closed it"
        with socket.create_connection(("127.0.0.1", port), timeout=30) as silent:
            assert silent.recv(1) == b""
        with httpx2.Client(
            timeout=120, base_url=f"http://127.0.0.1:{port}"
        ) as client:  # keeps its connection
            assert [client.get("/api/board").status_code for _ in range(3)] == [200] * 3


@pytest.mark.parametrize(
    "setting",
    [
        ("model", {"path": "/etc"}),
        ("model", {"path": "../outside/secret"}),
        ("model", {"path": "link"}),
        ("model", {"path": "~/models"}),
        ("data", {"datasets": ["rows"], "dataset_dir": "/etc"}),
        ("data", {"datasets": ["/etc/passwd"]}),
        ("data", {"datasets": ["file:///etc/passwd"]}),
        ("checkpoint", {"resume": "../outside/secret/checkpoint-1"}),
        ("train", {"output_dir": "runs/x", "cache_dir": "/var"}),
    ],
)
def test_a_recipe_names_only_folders_of_the_root_and_those_named_at_start(root, setting):
    name, section = setting
    recipe = {
        "model": {"path": "org/model"},
        "data": {"datasets": ["org/rows"]},
        "stage": "sft",
        "train": {"output_dir": "runs/x", "max_steps": 1},
        name: section,
    }
    text = json.dumps(recipe)
    token = {"Authorization": "Bearer secret", **MINE}
    hosts = hosts_of("0.0.0.0", ["gpu-7"])
    app = create_app(root, token="secret", hosts=hosts, folders=[root.parent / "shared"])
    with TestClient(app, base_url="http://gpu-7", headers=token) as client:
        for path, more in (("try", {"command": "preview"}), ("start", {})):
            answer = client.post(f"/api/{path}", json={"text": text, "file": "x.yaml", **more})
            assert (answer.status_code, "--folder" in answer.text) == (409, True), answer.text
        allowed = json.dumps({**recipe, name: {"path": str(root.parent / "shared/model")}})
        found = client.post("/api/check", json={"text": allowed if name == "model" else "a: 1"})
        assert "--folder" not in found.text
    assert not (root / "x.yaml").exists()
