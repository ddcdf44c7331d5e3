"""What a bare machine needs beside the tree: wheels, and a trial of them without network.

    .venv/bin/python benchmarks/gpu/bundle.py                 # downloads into .wheels, checks
    .venv/bin/python benchmarks/gpu/bundle.py try speed       # runs one part here as it will there

``carried.txt`` pins what is carried, ``present.txt`` names what the machine is expected to have:
together they must have everything that Surefoot and the wheels require. Tree and wheels together
must stay below ``--limit-mib``. ``try`` copies the tree, makes a virtual environment that has
nothing but the packages of ``present.txt``, and runs ``bare.sh`` there, cut off from the network.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import venv
import zipfile
from collections.abc import Iterable, Sequence
from email.parser import HeaderParser
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
PLATFORMS = (
    "manylinux_2_31",
    "manylinux_2_28",
    "manylinux_2_27",
    "manylinux_2_24",
    "manylinux_2_17",
)
PLATFORMS += ("manylinux2014", "manylinux1")
TESTS = ("pytest", "pytest-xdist", "hypothesis")  # beside Surefoot's own requirements
LIMIT_MIB = 64
# Libraries of other GPUs in bitsandbytes' wheel: five sixths of it. The machine has CUDA 13.
FOREIGN = re.compile(r"bitsandbytes/libbitsandbytes_(?!cpu|cuda13)\w+\.so")
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


def pins(without: Sequence[str] = ()) -> list[str]:
    """The lines of carried.txt but those of some packages."""
    left = {canonicalize_name(name) for name in without}
    return [line for line in _lines("carried.txt") if canonicalize_name(_name(line)) not in left]


def present() -> set[str]:
    """Names of what the machine is expected to have."""
    return {canonicalize_name(line) for line in _lines("present.txt")}


def _lines(name: str) -> list[str]:
    lines = (FOLDER / name).read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def _name(requirement: str) -> str:
    return re.split(r"[=<>~! ;\[]", requirement, maxsplit=1)[0]


def download(folder: Path, wanted: Sequence[str], python: str) -> None:
    """Fetch exactly these wheels for Linux on x86_64, from scratch."""
    shutil.rmtree(folder, ignore_errors=True)
    platforms = [word for name in PLATFORMS for word in ("--platform", f"{name}_x86_64")]
    options = ["--no-deps", "--only-binary=:all:", "--implementation", "cp", *platforms]
    options += ["--python-version", python, "--dest", str(folder)]
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", *options, *wanted], check=True
    )


def slim(wheel: Path) -> None:
    """Leave out the libraries of a wheel that the machine has no device for."""
    with zipfile.ZipFile(wheel) as archive:
        left_out = {name for name in archive.namelist() if FOREIGN.fullmatch(name)}
        if not left_out:
            return
        slimmer = wheel.with_suffix(".part")
        with zipfile.ZipFile(slimmer, "w", zipfile.ZIP_DEFLATED) as found:
            for name in archive.namelist():
                content = archive.read(name)
                if name.endswith(".dist-info/RECORD"):
                    lines = content.decode().splitlines(keepends=True)
                    kept = [line for line in lines if line.partition(",")[0] not in left_out]
                    content = "".join(kept).encode()
                if name not in left_out:
                    found.writestr(archive.getinfo(name), content)
    slimmer.replace(wheel)


def requirements(wheel: Path) -> list[str]:
    """What a wheel requires."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        name = next(n for n in names if re.fullmatch(r"[^/]+\.dist-info/METADATA", n))
        metadata = HeaderParser().parsestr(archive.read(name).decode())
    return metadata.get_all("Requires-Dist", [])


def missing(wheels: Iterable[Path], python: str) -> list[str]:
    """Requirements that are neither carried nor expected to be there."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = {"Surefoot": [*project["dependencies"], *TESTS]}
    wanted |= {wheel.name.partition("-")[0]: requirements(wheel) for wheel in wheels}
    known = present() | {canonicalize_name(name) for name in wanted}
    machine = {"python_version": python, "extra": "", "sys_platform": "linux"}
    machine |= {"platform_system": "Linux", "platform_machine": "x86_64"}
    found = []
    for owner, lines in wanted.items():
        for line in map(Requirement, lines):
            is_needed = line.marker is None or line.marker.evaluate(machine)
            if is_needed and canonicalize_name(line.name) not in known:
                found.append(f"{owner} requires {line}")
    return found


def tree() -> list[Path]:
    """The files of the tree that travel: tracked ones, and those that git does not ignore."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others"]
    done = subprocess.run([*command, "--exclude-standard"], check=True, capture_output=True)
    names = [name for name in done.stdout.decode().split("\0") if name]
    return [ROOT / name for name in names if (ROOT / name).is_file()]


def check(wheels: Sequence[Path], files: Sequence[Path], limit_mib: float, python: str) -> str:
    """A line with the sizes. Ends the program if something is missing, or all is too large."""
    if absent := missing(wheels, python):
        listed = "\n  ".join(absent)
        raise SystemExit(f"not carried, and not in present.txt:\n  {listed}\nAdd it to carried.txt")
    sizes = {path.name: path.stat().st_size / 2**20 for path in wheels}
    rest = sum(path.stat().st_size for path in files) / 2**20
    total = sum(sizes.values()) + rest
    text = f"{total:.1f} MiB: {len(sizes)} wheels {sum(sizes.values()):.1f}, tree {rest:.1f}"
    if total > limit_mib:
        name = max(sizes, key=lambda name: sizes[name])
        raise SystemExit(
            f"{text}; expected at most {limit_mib:.0f}. The largest wheel is {name} "
            f"({sizes[name]:.1f}): leave it out with --without {name.partition('-')[0]}"
        )
    return text


def build(folder: Path, python: str, without: Sequence[str], limit_mib: float) -> str:
    """Download, check, and note the commit for a copy that has no git."""
    download(folder, pins(without), python)
    for wheel in folder.glob("*.whl"):
        slim(wheel)
    text = check(sorted(folder.glob("*.whl")), tree(), limit_mib, python)
    sys.path.insert(0, str(FOLDER))
    import results

    (folder / "COMMIT").write_text(results.commit() + "\n")
    return text


def bare_environment(folder: Path) -> Path:
    """A fresh virtual environment with links to what a bare machine is expected to have, in the
    versions of this one; returns its Python."""
    venv.create(folder, with_pip=False, symlinks=True)
    site = folder / "lib" / f"python{HERE}" / "site-packages"
    for found in linked():
        for top in {file.parts[0] for file in found.files or () if file.parts[0] != ".."}:
            target = Path(str(found.locate_file(top)))
            if target.exists() and not (site / top).exists() and top != "__pycache__":
                (site / top).symlink_to(target)
    return folder / "bin" / "python"


def linked() -> list[Distribution]:
    """The packages of present.txt, and what these require in the versions of this environment;
    none that is carried."""
    carried = {canonicalize_name(_name(line)) for line in pins()}
    found: dict[str, Distribution] = {}
    wanted = sorted(present())
    while wanted:
        name = wanted.pop()
        if name in found or name in carried:
            continue
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:
            continue
        needs = map(Requirement, found[name].requires or ())
        wanted += [
            canonicalize_name(need.name)
            for need in needs
            if need.marker is None or need.marker.evaluate({"extra": ""})
        ]
    return list(found.values())


def attempt(arguments: Sequence[str], without: Sequence[str]) -> int:
    """Run ``bare.sh`` on a copy of the tree with wheels for this Python; returns its exit code."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy = folder / "tree"
        for path in tree():
            target = copy / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target)
        print(build(copy / ".wheels", HERE, without, LIMIT_MIB), flush=True)
        python = bare_environment(folder / "environment")
        kept = {key: os.environ[key] for key in ("PATH", "LANG") if key in os.environ}
        environment = {**kept, "HOME": name, "PYTHON": str(python), "SITE": f"{name}/site"}
        environment |= {"OMP_NUM_THREADS": "1", "PIP_CONFIG_FILE": os.devnull}
        command = [*_cut_off(), "sh", str(copy / "benchmarks/gpu/bare.sh"), *arguments]
        return subprocess.run(command, env=environment, check=False).returncode


def _cut_off() -> list[str]:
    """What makes a command run without network but the loopback, where the system lets us."""
    command = ["unshare", "--net", "sh", "-c", 'ip link set lo up || true; exec "$@"', "sh"]
    try:
        done = subprocess.run([*command, "true"], capture_output=True, check=False)
    except OSError:
        return []
    return command if done.returncode == 0 else []


def main() -> None:
    """Build the bundle, or try it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / ".wheels")
    parser.add_argument("--python", default="3.12", help="version on the bare machine")
    parser.add_argument("--without", action="append", default=[], help="a package to leave out")
    parser.add_argument("--limit-mib", type=float, default=LIMIT_MIB, help="of tree and wheels")
    parser.add_argument("command", nargs="?", choices=("build", "try"), default="build")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the kit, after try")
    options = parser.parse_args()
    if options.command == "try":
        raise SystemExit(attempt(options.arguments, options.without))
    print(build(options.out, options.python, options.without, options.limit_mib))


if __name__ == "__main__":
    main()
