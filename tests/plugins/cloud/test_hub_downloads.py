"""Downloads from hubs: resumed after a kill, verified, refused when damaged or offline."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hub_server import serving, sha256
from surefoot.plugins.cloud import hubs as huggingface
from surefoot.plugins.cloud.hubs import HUGGING_FACE, MODELSCOPE
from surefoot.storage import remote as module
from surefoot.storage.remote import HubError

BIG = bytes(range(256)) * 12000  # 3 MB
FILES = {"config.json": b"{}", "model.safetensors": BIG, "sub/more.json": b"[1]", "code.py": b"x"}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A server with one model and one dataset of each hub, and caches in a folder."""
    for name in module.OFFLINE:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path / "ms"))
    monkeypatch.setenv("MODELSCOPE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with serving() as (found, url):
        monkeypatch.setenv("MODELSCOPE_ENDPOINT", url)
        found.url = url
        found.repositories[("models", "owner/tiny.model")] = dict(FILES)
        yield found


def bodies(hub, name):
    return [start for path, start in hub.served if path == name]


def test_without_its_package_modelscope_is_refused_with_the_cure(monkeypatch):
    monkeypatch.setitem(sys.modules, "modelscope_hub", None)
    with pytest.raises(HubError, match=r"owner/x is of ModelScope.*-e '\.\[modelscope\]'"):
        MODELSCOPE.snapshot("models", "owner/x")


def test_a_file_of_the_cache_is_hashed_once_whoever_has_downloaded_it(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    blobs, snapshot, sent, hashed = tmp_path / "blobs", tmp_path / "snapshot", [BIG], []
    names = {
        "model.safetensors": sha256(BIG),
        "config.json": "9e26dfeeb6e641a33dae4961196235bdb965b21b",
    }
    blobs.mkdir()
    snapshot.mkdir()

    def snapshot_download(*_, **__):
        """As the library does: it downloads what is not there."""
        for name, content in (("model.safetensors", sent[-1]), ("config.json", b"{}")):
            if not (blob := blobs / names[name]).exists():
                blob.write_bytes(content)
                (snapshot / name).unlink(missing_ok=True)
                (snapshot / name).symlink_to(blob)
        return str(snapshot)

    def digest_of(path, *how):
        hashed.append(path.name)
        return module.digest_of(path, *how)

    monkeypatch.setattr(huggingface, "_prefetch", lambda *_: None)
    monkeypatch.setattr(huggingface, "snapshot_download", snapshot_download)
    monkeypatch.setattr(huggingface, "digest_of", digest_of)
    assert HUGGING_FACE.snapshot("models", "owner/x") == snapshot
    HUGGING_FACE.snapshot("models", "owner/x")
    assert sorted(hashed) == sorted(names.values())
    weights = snapshot / "model.safetensors"
    weights.write_bytes(BIG[:-1] + b"!")  # as long as it was
    assert HUGGING_FACE.snapshot("models", "owner/x") == snapshot
    assert weights.read_bytes() == BIG
    weights.write_bytes(b"cut")
    sent.append(b"damaged")
    with pytest.raises(HubError, match=r"model.safetensors: its hash is \w+, expected .* removed"):
        HUGGING_FACE.snapshot("models", "owner/x")
    assert not weights.exists()


@pytest.fixture
def package():
    """ModelScope's package."""
    return pytest.importorskip("modelscope_hub")


def test_a_model_of_modelscope_is_downloaded_once(hub, package, monkeypatch):
    patterns = ("*.json", "*.safetensors")
    folder = MODELSCOPE.snapshot("models", "owner/tiny.model", patterns=patterns)
    assert (folder / "model.safetensors").read_bytes() == BIG
    assert (folder / "sub" / "more.json").read_bytes() == b"[1]"
    assert not (folder / "code.py").exists()
    before = len(hub.served)
    assert MODELSCOPE.snapshot("models", "owner/tiny.model", patterns=patterns) == folder
    assert len(hub.served) == before, "nothing is downloaded again"
    hub.repositories[("models", "owner/tiny.model")]["config.json"] = b"{ }"
    MODELSCOPE.snapshot("models", "owner/tiny.model", patterns=patterns)
    assert (folder / "config.json").read_bytes() == b"{ }", "but what has changed"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    asked = len(hub.asked)
    assert MODELSCOPE.snapshot("models", "owner/tiny.model", patterns=patterns) == folder
    assert MODELSCOPE.snapshot("models", "owner/tiny.model", patterns=patterns[:1]) == folder
    with pytest.raises(HubError, match="of ModelScope is not on this machine, and HF_HUB_OFFLINE"):
        MODELSCOPE.snapshot("models", "owner/tiny.model")  # some of its files are
    assert len(hub.asked) == asked


def test_a_damaged_file_of_modelscope_is_refused(hub, package, monkeypatch):
    monkeypatch.setattr("modelscope_hub._download.time.sleep", lambda _: None)
    hub.damaged["config.json"] = 1
    folder = MODELSCOPE.snapshot("models", "owner/tiny.model", patterns=("*.json",))
    assert (folder / "config.json").read_bytes() == b"{}"
    hub.repositories[("models", "owner/tiny.model")]["config.json"] = b"{ }"
    hub.damaged["config.json"] = 9
    with pytest.raises(HubError, match=r"config\.json.*Hash mismatch"):
        MODELSCOPE.snapshot("models", "owner/tiny.model", patterns=("*.json",))


def test_modelscope_says_what_is_wrong(hub, package, monkeypatch):
    with pytest.raises(HubError, match="ModelScope has no owner/other"):
        MODELSCOPE.snapshot("models", "owner/other")
    hub.needs_token = True
    with pytest.raises(HubError, match="set MODELSCOPE_API_TOKEN"):
        MODELSCOPE.snapshot("models", "owner/tiny.model")
    monkeypatch.setenv("MODELSCOPE_API_TOKEN", "secret")
    assert (MODELSCOPE.snapshot("models", "owner/tiny.model") / "config.json").exists()


def test_a_path_of_a_hub_stays_in_its_folder(hub, package):
    hub.repositories[("models", "owner/evil")] = {"../../outside": b"x"}
    with pytest.raises(HubError, match="is outside of its folder"):
        MODELSCOPE.snapshot("models", "owner/evil")


PROGRAM = """
import sys
from surefoot.errors import SurefootError
from surefoot.storage.remote import HUBS
try:
    print(HUBS[sys.argv[1]].snapshot("models", "owner/tiny.model"))
except SurefootError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize(
    "kind", [pytest.param("modelscope", marks=pytest.mark.proof), "huggingface"]
)
def test_a_killed_download_is_resumed_and_verified(hub, tmp_path, kind):
    if kind == "modelscope":
        pytest.importorskip("modelscope_hub")
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
    first = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    begun = ("*.part", "*.incomplete")
    while not any(p.stat().st_size > 100_000 for name in begun for p in tmp_path.rglob(name)):
        assert first.poll() is None, first.communicate()
        time.sleep(0.02)
    first.send_signal(signal.SIGKILL)
    first.communicate()
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
