"""DNS rebinding: the name of a foreign page resolves to the board's address."""

import socket

import pytest
from starlette.testclient import TestClient

import commands
from surefoot.errors import RunError
from surefoot.plugins.board.app import create_app
from surefoot.storage.web import hosts_of, is_loopback

from .runs import COMPLETE, write_run

BEARER = {"Authorization": "Bearer a-long-secret"}
ATTACKS = [
    "evil.example",
    "evil.example:7860",
    "127.0.0.1.evil.example",
    "127.0.0.1:7860.evil.example",
    "gpu-7@evil.example",
    "gpu-7.evil.example",
    "evilgpu-7",
    "localhost.evil.example",
    "",
    "[",
    ":7860",
    "gpu-7:80:80",
    "gpu-7/evil",
    "gpu-7, evil.example",
]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("root")
    write_run(root / "run", end=COMPLETE)
    return root


@pytest.fixture(params=["token", "read-only"])
def client(root, request, monkeypatch):
    """A board that others reach, and who has its token; once read-only."""
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu-7")
    monkeypatch.setattr(socket, "getfqdn", lambda: "gpu-7.cluster.example")
    hosts = hosts_of("0.0.0.0", ["board.example.org"])
    is_read_only = request.param == "read-only"
    app = create_app(root, "a-long-secret", hosts=hosts, is_read_only=is_read_only)
    with TestClient(app, base_url="http://gpu-7:7860", follow_redirects=False) as found:
        yield found


@pytest.mark.parametrize("host", ATTACKS)
def test_another_name_gets_nothing_even_with_the_token_and_the_cookie(client, host):
    client.cookies.set("surefoot_token", "a-long-secret")
    for path in ("/", "/api/runs", "/static/app.js", "/?token=a-long-secret"):
        answer = client.get(path, headers={**BEARER, "Host": host})
        assert answer.status_code == 421, path
        assert "set-cookie" not in answer.headers
    sent = {**BEARER, "X-Surefoot": "1", "Host": host, "Origin": f"http://{host}"}
    assert client.post("/api/check", json={"text": "a: 1"}, headers=sent).status_code == 421


NAMES = ["gpu-7", "GPU-7:7860", "gpu-7.", "gpu-7.local", "gpu-7.cluster.example:80"]
NAMES += ["board.example.org", "localhost:7860", "127.0.0.1", "[::1]:7860"]
NAMES += ["10.1.2.3:7860", "0.0.0.0", "[fe80::1]:80"]


@pytest.mark.parametrize("host", NAMES)
def test_names_of_the_machine_addresses_and_given_names_are_answered(client, host):
    assert client.get("/api/runs", headers={**BEARER, "Host": host}).status_code == 200
    assert client.get("/api/runs", headers={"Host": host}).status_code == 401


def test_two_hosts_in_one_request_are_refused(client):
    sent = [("Host", "gpu-7"), ("Host", "evil.example"), *BEARER.items()]
    assert client.get("/api/runs", headers=sent).status_code == 421


def test_the_refusal_names_the_option_but_never_for_what_is_no_name(client):
    said = client.get("/", headers={"Host": "proxy.example"}).text
    assert "start it with --host-name proxy.example" in said
    said = client.get("/", headers={"Host": "<b>;--x"}).text
    assert "--host-name" not in said
    assert "expected the name or address of this board" in said


def test_on_this_machines_own_address_no_other_address_is_answered(root):
    with TestClient(create_app(root), base_url="http://127.0.0.1:7860") as client:
        for host in ("evil.example", "10.1.2.3", socket.gethostname(), "[", ""):
            for path in ("/", "/api/runs"):
                assert client.get(path, headers={"Host": host}).status_code == 421
        for host in ("localhost:7860", "127.0.0.1", "[::1]:7860"):
            assert client.get("/api/runs", headers={"Host": host}).status_code == 200
    named = hosts_of("127.0.0.1", ["Board.Example.org", "10.1.2.3"])
    assert not any(named.refusal([host], "board") for host in ("board.example.org:80", "10.1.2.3"))


def test_a_board_that_a_proxy_shows_to_others_needs_the_token():
    assert hosts_of("127.0.0.1", ["board.example.org"]).is_open
    assert hosts_of("10.1.2.3").is_open
    assert not hosts_of("127.0.0.1", ["localhost"]).is_open
    assert not hosts_of("::1").is_open


def test_an_option_that_is_no_name_is_an_error(root):
    for name in ("", "http://x", "x:80", "a b", "*", ".example.org", "x/y", "a@b", "a" * 300):
        with pytest.raises(RunError, match="--host-name: expected a name without scheme and port"):
            hosts_of("127.0.0.1", [name])
    for command in ("board", "serve"):
        said = commands.refused(command, root, "--port=0", "--host-name=http://x")
        assert "--host-name: expected a name" in said


def test_loopback_addresses():
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "localhost", "::1", "[::1]")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.1.1.1", "", "gpu-7")))
