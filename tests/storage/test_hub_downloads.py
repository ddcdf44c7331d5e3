"""Downloads from hubs: resumed after a kill, verified, refused when damaged or offline."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hub_server import serving, sha256
from surefoot.storage.hubs import file_download as module
from surefoot.storage.hubs import modelscope
from surefoot.storage.hubs.file_download import HubError, NotReachedError, RemoteFile, download

BIG = bytes(range(256)) * 12000  # 3 MB
FILES = {"config.json": b"{}", "model.safetensors": BIG, "sub/more.json": b"[1]", "code.py": b"x"}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A server with one model and one dataset of each hub, and caches in a folder."""
    for name in module.OFFLINE:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(module, "WAIT", 0.01)
    monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path / "ms"))
    with serving() as (found, url):
        monkeypatch.setenv("MODELSCOPE_ENDPOINT", url)
        found.url = url
        found.repositories[("models", "owner/tiny.model")] = dict(FILES)
        found.repositories[("files", "rows.jsonl")] = BIG
        yield found


def bodies(hub, name):
    return [start for path, start in hub.served if path == name]


def test_a_lost_connection_is_resumed_at_its_byte(hub, tmp_path):
    hub.drops["rows.jsonl"] = 1_000_000
    file = RemoteFile(f"{hub.url}/rows.jsonl", len(BIG), sha256(BIG))
    path = download(file, tmp_path / "rows.jsonl")
    assert path.read_bytes() == BIG
    assert bodies(hub, "rows.jsonl") == [0, 1_000_000]
    assert not list(tmp_path.glob("*.part"))


def test_a_damaged_file_is_downloaded_once_more_and_then_refused(hub, tmp_path):
    file = RemoteFile(f"{hub.url}/rows.jsonl", len(BIG), sha256(BIG))
    hub.damaged["rows.jsonl"] = 1
    assert download(file, tmp_path / "once").read_bytes() == BIG
    hub.damaged["rows.jsonl"] = 2
    with pytest.raises(HubError, match=r"its sha256 is \w+, expected \w+; nothing was kept"):
        download(file, tmp_path / "twice")
    assert not (tmp_path / "twice").exists()
    assert not (tmp_path / "twice.part").exists()


def test_what_the_server_refuses_is_said_at_once(hub, tmp_path):
    with pytest.raises(HubError, match=r"no\.jsonl: the server answers 404 Not Found"):
        download(RemoteFile(f"{hub.url}/no.jsonl"), tmp_path / "no")


def test_a_redirect_to_another_host_gets_no_secret(hub, tmp_path):
    file = RemoteFile(f"{hub.url}/moved/rows.jsonl", headers={"Authorization": "Bearer x"})
    assert download(file, tmp_path / "rows").read_bytes() == BIG
    assert hub.secrets == ["Bearer x", None]


def test_a_server_that_is_down_is_one_sentence(tmp_path, monkeypatch):
    for name in module.OFFLINE:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(module, "WAIT", 0.01)
    with pytest.raises(NotReachedError, match=r"127.0.0.1:9 cannot be reached \(Connection ref"):
        download(RemoteFile("http://127.0.0.1:9/x"), tmp_path / "x")
    began = time.monotonic()
    with pytest.raises(NotReachedError, match=r"no-such-host.invalid cannot be reached"):
        download(RemoteFile("http://no-such-host.invalid/x"), tmp_path / "x")
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("name", module.OFFLINE)
def test_offline_flags_forbid_the_network(hub, tmp_path, monkeypatch, name):
    monkeypatch.setenv(name, "1")
    with pytest.raises(HubError, match=f"and {name} is set; unset {name}"):
        download(RemoteFile(f"{hub.url}/rows.jsonl"), tmp_path / "x")
    with pytest.raises(HubError, match=f"owner/tiny.model of ModelScope .* {name} is set"):
        modelscope.snapshot("models", "owner/tiny.model")
    assert not hub.asked


def test_a_model_of_modelscope_is_downloaded_once(hub, monkeypatch):
    patterns = ("*.json", "*.safetensors")
    folder = modelscope.snapshot("models", "owner/tiny.model", patterns=patterns)
    assert folder.name == "tiny___model"
    assert (folder / "model.safetensors").read_bytes() == BIG
    assert (folder / "sub" / "more.json").read_bytes() == b"[1]"
    assert not (folder / "code.py").exists()
    before = len(hub.served)
    assert modelscope.snapshot("models", "owner/tiny.model", patterns=patterns) == folder
    assert len(hub.served) == before, "nothing is downloaded again"
    hub.repositories[("models", "owner/tiny.model")]["config.json"] = b"{ }"
    modelscope.snapshot("models", "owner/tiny.model", patterns=patterns)
    assert (folder / "config.json").read_bytes() == b"{ }", "but what has changed"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    asked = len(hub.asked)
    assert modelscope.snapshot("models", "owner/tiny.model", patterns=patterns) == folder
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", "http://127.0.0.1:9")
    assert modelscope.snapshot("models", "owner/tiny.model", patterns=patterns) == folder
    assert len(hub.asked) == asked


def test_a_file_that_another_program_has_downloaded_is_verified(hub):
    folder = modelscope.folder_of("models", "owner/tiny.model", None)
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(BIG)
    (folder / "config.json").write_bytes(b"[]")  # as long, and not the same
    modelscope.snapshot("models", "owner/tiny.model")
    assert bodies(hub, "model.safetensors") == []
    assert (folder / "config.json").read_bytes() == b"{}"


def test_a_large_dataset_of_modelscope_is_listed_page_by_page(hub):
    many = {f"data/{n:03d}.json": b"[]" for n in range(450)}
    hub.repositories[("datasets", "owner/rows")] = many
    folder = modelscope.snapshot("datasets", "owner/rows", patterns=("data/*9.json",))
    assert len(list(folder.glob("data/*"))) == 45
    assert sum("repo/tree" in asked for asked in hub.asked) == 3


def test_modelscope_says_what_is_wrong(hub, monkeypatch):
    with pytest.raises(HubError, match="ModelScope has no owner/other"):
        modelscope.snapshot("models", "owner/other")
    hub.needs_token = True
    with pytest.raises(HubError, match="set MODELSCOPE_API_TOKEN"):
        modelscope.snapshot("models", "owner/tiny.model")
    monkeypatch.setenv("MODELSCOPE_API_TOKEN", "secret")
    assert (modelscope.snapshot("models", "owner/tiny.model") / "config.json").exists()


def test_a_path_of_a_hub_stays_in_its_folder(hub):
    hub.repositories[("models", "owner/evil")] = {"../../outside": b"x"}
    with pytest.raises(HubError, match="is outside of its folder"):
        modelscope.snapshot("models", "owner/evil")


PROGRAM = """
import sys
from pathlib import Path
if sys.argv[1] == "modelscope":
    from surefoot.storage.hubs import modelscope
    print(modelscope.snapshot("models", "owner/tiny.model"))
else:
    from huggingface_hub import snapshot_download
    from surefoot.storage.hubs.huggingface import download_verified, prefetch, why_not_reached
    def load():
        prefetch("owner/tiny.model")
        return Path(snapshot_download("owner/tiny.model"))
    try:
        print(download_verified(load))
    except Exception as error:
        print(type(error).__name__, why_not_reached(error))
"""


@pytest.mark.parametrize("kind", ["modelscope", "huggingface"])
def test_a_killed_download_is_resumed_and_verified(hub, tmp_path, kind):
    environment = {
        **{name: value for name, value in os.environ.items() if name not in module.OFFLINE},
        **{"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1"},
        **{"XDG_CACHE_HOME": str(tmp_path / "cache"), "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
    }
    command = [sys.executable, "-c", PROGRAM, kind]

    def run():
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        return done.stdout.strip() or done.stderr

    hub.slow.add("model.safetensors")
    hub.repositories[("models", "owner/tiny.model")]["model.safetensors"] = BIG * 8
    first = subprocess.Popen(command, env=environment)
    while not any(part.stat().st_size > 100_000 for part in tmp_path.rglob("*.part")):
        time.sleep(0.02)
    first.send_signal(signal.SIGKILL)
    first.wait()
    hub.slow.clear()
    said = run()
    starts = bodies(hub, "model.safetensors")
    assert (Path(said) / "model.safetensors").read_bytes() == BIG * 8, said
    assert starts[0] == 0
    assert starts[1] > 0, "the second one is resumed"
    if kind == "modelscope":
        return
    hub.repositories[("models", "owner/tiny.model")]["model.safetensors"] = BIG[::-1]
    hub.damaged["model.safetensors"] = 2
    said = run()
    assert said.startswith("HubError "), said
    assert "its sha256 is" in said
    assert (Path(run()) / "model.safetensors").is_file(), "the third answer is right"
