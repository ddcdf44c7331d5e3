import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from surefoot import __version__
from surefoot.cli import env as env
from surefoot.cli.main import main
from surefoot.run.policy import used_here

TORCH = env.TORCH


@pytest.fixture
def few(monkeypatch):
    """Only packages that import quickly."""
    monkeypatch.setattr(env, "PACKAGES", {"xxhash": "xxhash.no_such_part", "click": "click"})
    monkeypatch.setattr(env, "OPTIONAL", {"no-such-package": "no_such_package"})
    monkeypatch.setattr(env, "CHOICES", "found = {'packed attention': 'sdpa'}")
    monkeypatch.setattr(env, "TORCH", "found = {}")


def run(*args):
    return CliRunner().invoke(main, ["env", *args])


def test_env_tells_versions_devices_memory_and_disk(few, monkeypatch):
    monkeypatch.setattr(env, "TORCH", TORCH)
    result = run()
    assert result.exit_code == 0
    assert __version__ in result.stdout
    for word in ("python", "memory", "disk", "GiB free", "devices", "bf16"):
        assert word in result.stdout
    assert "used here\n  packed attention sdpa\n" in result.stdout


def test_a_package_that_does_not_load_or_is_not_there_is_named(few):
    packages = json.loads(run("--json").stdout)
    assert packages["packages"]["click"][0].isdigit()
    assert "does not load: ModuleNotFoundError" in packages["packages"]["xxhash"]
    assert packages["optional"] == {"no-such-package": "not installed"}


def test_a_torch_that_does_not_load_is_no_end_of_the_report(few, monkeypatch):
    monkeypatch.setattr(env, "TORCH", "raise OSError('libcudart.so: no such file')")
    report = json.loads(run("--json").stdout)
    assert report["torch"] == {"build": "does not load: OSError: libcudart.so: no such file"}
    assert report["used here"] == {"packed attention": "sdpa"}


def test_choices_that_cannot_be_looked_up_are_no_end_of_the_report(few, monkeypatch):
    monkeypatch.setattr(env, "CHOICES", "raise ImportError('no')")
    assert json.loads(run("--json").stdout)["used here"] == {"not known": "ImportError: no"}


def test_a_package_may_print_and_those_after_one_that_crashes_are_still_tried():
    codes = {"loud": "print('[1, 2]'); print('hello'); found = 1", "dead": "os._exit(139)"}
    found = env.probe_all({**codes, "after": "found = 2"})
    assert found == {
        "loud": env.ProbeResult(1),
        "dead": env.ProbeResult(None, "exit code 139"),
        "after": env.ProbeResult(2),
    }


def test_a_crash_in_a_package_is_told_by_its_exit_code():
    assert env.probe("import os; os._exit(139)") == ("", "exit code 139")
    assert env.probe("print(1)") == ("1\n", "")


def test_a_package_that_hangs_is_given_up(monkeypatch):
    monkeypatch.setattr(env, "TIMEOUT", 0.5)
    assert env.probe("import time; time.sleep(60)") == ("", "nothing after 0.5 s")


def test_what_is_used_here_is_what_the_page_of_devices_says():
    page = (Path(__file__).parents[2] / "docs" / "devices.md").read_text()
    table = page.partition("## GPU")[2 * torch.cuda.is_available()]
    rows = {row[0]: row[2] for row in (r[2:-2].split(" | ") for r in table.splitlines()) if row[2:]}
    for name, used in used_here().items():
        assert {*re.findall(r"\w+", used)} <= {*re.findall(r"\w+", rows[name])}, name


def test_every_package_we_need_is_asked_for():
    """What pyproject.toml requires and has compiled parts is in the list, so that it is loaded."""
    listed = {**env.PACKAGES, **env.OPTIONAL}
    assert {"torch", "tokenizers", "safetensors", "pyarrow", "numpy", "xxhash"} <= listed.keys()
    code = "import importlib.util as u; print([n for n in %r if u.find_spec(n) is None])"
    tops = sorted({name.split(".")[0] for name in env.PACKAGES.values()})
    done = subprocess.run(
        [sys.executable, "-c", code % tops], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
