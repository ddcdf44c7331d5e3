"""The package: what a wheel contains, and the extras that messages name.

The proofs build what a release uploads, install it with pip and uv and run the demo outside of the
clone. The dependencies of these environments are those of this one, but where all come from a
wheelhouse.
"""

import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from surefoot.cli import demo
from surefoot.errors import EXTRAS as EXTRAS_OF
from surefoot.errors import installation

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
INCLUDED = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
TEXTS = {path: path.read_text() for path in sorted((ROOT / "src").rglob("*.py"))}
READ = (".md", ".json", ".yaml", ".yml", ".ipynb", ".sbatch")  # by people, and typed
PAGES = [*ROOT.glob("*.*"), *ROOT.glob("docs/[!d]*/*"), *ROOT.glob("docs/*.md")]
PAGES += [*ROOT.glob("examples/*.*"), *ROOT.glob("examples/cluster/*")]


def test_the_files_of_the_demo_are_part_of_the_package():
    assert {Path(source).name for source in INCLUDED} == set(demo.PARTS)
    for source, target in INCLUDED.items():
        assert (ROOT / source).exists()
        assert target == f"surefoot/demo/{Path(source).name}"


def test_the_demo_keeps_what_is_in_its_folder(tmp_path):
    (tmp_path / demo.RECIPE).write_text("mine")
    demo.copy_files(tmp_path)
    assert (tmp_path / demo.RECIPE).read_text() == "mine"
    assert (tmp_path / "base-model" / "model.safetensors").is_file()
    assert (tmp_path / "data" / "orders_train.jsonl").is_file()


def test_everything_that_make_installs_is_locked_within_its_range():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    locked = {pin.name: pin.specifier for pin in pins if not pin.marker or pin.marker.evaluate()}
    for line in (*PROJECT["project"]["dependencies"], *EXTRAS["dev"]):
        wanted = Requirement(line)
        (pin,) = locked[canonicalize_name(wanted.name)]
        assert pin.operator == "==", pin
        assert wanted.specifier.contains(pin.version), f"{line}: {pin}; run make lock"


def test_an_extra_is_installed_from_the_clone_by_every_page_and_message():
    """The name surefoot on the index is somebody else's, so no text may bring a reader there."""
    optional = {Requirement(line).name for name in EXTRAS for line in EXTRAS[name]}
    pages = {path: path.read_text() for path in PAGES if path.suffix in READ}
    for path, text in {**TEXTS, **pages}.items():
        assert "surefoot[" not in text, path
        named = re.findall(r"pip install [\"']?([A-Za-z][\w.-]*)", text)
        assert not {name for name in named if canonicalize_name(name) in optional}, path
        extras = ",".join(re.findall(r"pip install -e '?\.\[([\w,-]+)\]", text))
        assert not extras or {*extras.split(",")} <= {*EXTRAS}, path
        if extras and path.suffix == ".md":
            assert re.search(r"\bin (the|a) clone\b|克隆目录里", text.lower()), path


def test_every_package_with_an_extra_is_in_it():
    for module, extra in EXTRAS_OF.items():
        package = module.replace("_", "-")
        assert any(re.match(rf"{package}\b", needed) for needed in EXTRAS[extra]), package


def test_every_message_about_a_missing_package_names_an_extra():
    own = [path for path, text in TEXTS.items() if re.search(r"pip install [\w']", text)]
    assert not own


def test_a_package_of_several_extras_is_installed_by_the_one_that_is_needed():
    assert installation("fastapi", "serve") == "pip install -e '.[serve]' in the clone of Surefoot"
    assert installation("bitsandbytes") == "pip install -e '.[qlora]' in the clone of Surefoot"
    assert installation("timm") == "pip install timm"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """What a release uploads: the source archive of this clone, and the wheel of that archive.

    ``make release`` built them in ``DIST``.
    """
    tools = tmp_path_factory.mktemp("built")
    python = environment(tools / "venv")
    subprocess.run([python, "-m", "pip", "install", "-q", "build", "uv"], check=True)
    folder = Path(os.environ.get("DIST", tools))
    if "DIST" not in os.environ:
        command = [python, "-m", "build", "--outdir", folder, ROOT]
        subprocess.run(command, check=True, timeout=600, stdout=subprocess.DEVNULL)
    uv = tools / "venv" / "bin" / "uv"
    return {"wheel": next(folder.glob("*.whl")), "sdist": next(folder.glob("*.tar.gz")), "uv": uv}


def environment(folder):
    """The Python of a new virtual environment."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    return folder / "bin" / "python"


@pytest.mark.proof
def test_a_wheel_has_every_file_of_the_package(built):
    names = set(zipfile.ZipFile(built["wheel"]).namelist())
    command = ["git", "ls-files", "src/surefoot"]
    tracked = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    expected = {line.removeprefix("src/") for line in tracked.stdout.splitlines()}
    assert not expected - names
    assert "surefoot/demo/base-model/model.safetensors" in names
    licenses = {name.partition(".dist-info/licenses/")[2] for name in names}
    bundled = ROOT.glob("src/**/*.LICENSE")
    assert licenses - {""} == {"LICENSE", *(str(file.relative_to(ROOT)) for file in bundled)}
    assert built["wheel"].stat().st_size < 20e6


@pytest.mark.proof
@pytest.mark.parametrize(
    ("kind", "installer"), [("wheel", "pip"), ("sdist", "pip"), ("wheel", "uv")]
)
def test_what_is_installed_runs_the_demo_outside_of_the_clone(kind, installer, built, tmp_path):
    python = environment(tmp_path / "venv")
    command = [python, "-m", "pip", "install", "-q", "--no-deps", built[kind]]
    if installer == "uv":
        command = [
            built["uv"],
            "pip",
            "install",
            "-q",
            "--no-deps",
            "--python",
            python,
            built[kind],
        ]
    subprocess.run(command, check=True)
    purelib = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    own = subprocess.run([python, "-c", purelib], check=True, capture_output=True, text=True)
    # the packages that surefoot needs, without the editable surefoot beside them
    dependencies = Path(own.stdout.strip()) / "dependencies.pth"
    dependencies.write_text(sysconfig.get_paths()["purelib"] + "\n")
    run_demo(python, tmp_path)


@pytest.mark.proof
def test_a_wheelhouse_installs_offline_into_an_empty_environment(built, tmp_path):
    """As on a cluster without a network; ``--no-index`` asks no package index."""
    house, python = tmp_path / "house", environment(tmp_path / "venv")
    pip = [python, "-m", "pip"]
    lock = ["-c", ROOT / "constraints.txt"]
    subprocess.run([*pip, "wheel", "-q", "-w", house, *lock, built["wheel"]], check=True)
    offline = ["--no-index", "--find-links", house]
    subprocess.run([*pip, "install", "-q", *offline, "surefoot"], check=True)
    run_demo(python, tmp_path)


@pytest.mark.proof
@pytest.mark.parametrize("extra", sorted(EXTRAS))
def test_every_extra_can_be_installed(extra, built, tmp_path):
    """uv resolves it, beside the locked packages of this environment, and installs nothing."""
    command = [built["uv"], "pip", "install", "--dry-run", "--python", sys.executable]
    command.append(f"surefoot[{extra}] @ {built['wheel'].as_uri()}")
    resolved = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert resolved.returncode == 0, resolved.stderr


def run_demo(python, folder):
    """``surefoot demo`` in ``folder``, with nothing of this process around it."""
    ended = subprocess.run(
        [python.parent / "surefoot", "demo"],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "HOME": str(folder), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert ended.returncode == 0, ended.stderr
    assert (folder / "surefoot-demo" / "runs" / "quickstart" / "checkpoint-564").is_dir()
