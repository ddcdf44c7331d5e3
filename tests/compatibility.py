"""Run the tests with other versions, and write ``docs/compatibility.md`` from what came of it.

``make compatibility``, or ``ENV="oldest python3.12"`` for some of the environments below. Each is
made in ``.compatibility/NAME`` and deleted by hand. A run that was broken off is not recorded; an
environment that cannot be had here is, with the reason.
"""

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

PROJECT = Path(__file__).parent.parent
FOLDER = PROJECT / ".compatibility"
RECORDS = Path(__file__).with_suffix(".json")
PAGE = PROJECT / "docs" / "compatibility.md"
BEGIN, END = "<!-- from make compatibility -->", "<!-- to here -->"
SHOWN = ("torch", "transformers", "peft")
QUICK = ["-m", "not proof", "--fast"]
WHOLE = ["-m", "not proof"]
LOCK = ["-c", "constraints.txt"]
# Name, Python, arguments of pip, arguments of pytest.
ENVIRONMENTS = {
    "locked": ("3.11", LOCK, WHOLE),
    "latest": ("3.11", ["--upgrade", "--upgrade-strategy", "eager"], WHOLE),
    "torch 2.15": ("3.11", ["torch==2.15.*"], WHOLE),
    "oldest": ("3.11", [], QUICK),
    **{f"python{minor}": (minor, LOCK, QUICK) for minor in ("3.12", "3.13", "3.14")},
}


def oldest():
    """The lower bound of each library that the table shows, as pip's arguments."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    found = (re.match(r"([\w-]+)>=([\d.]+)", each) for each in project["dependencies"])
    bounds = dict(each.groups() for each in found if each)
    return [f"{name}=={bounds[name]}.*" for name in SHOWN]


def interpreter(version):
    """A Python of this version; None if there is none."""
    name = shutil.which(f"python{version}")
    command = [name, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    if (
        name is None
        or subprocess.run(command, capture_output=True, text=True).stdout[:-1] != version
    ):
        return None
    return name


def run(name):
    """Install an environment, run the tests in it, and return its record."""
    version, libraries, tests = ENVIRONMENTS[name]
    record = {"day": time.strftime("%Y-%m-%d"), "python": version}
    if (python := interpreter(version)) is None:
        return record | {"result": f"not run: no Python {version} on this machine"}
    folder = FOLDER / name.replace(" ", "-")
    subprocess.run([python, "-m", "venv", folder], check=True)
    pip = [folder / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check"]
    # No cap of the machine's own: its configuration may hold torch at what lies on its disk.
    env = os.environ | ({"PIP_CONFIG_FILE": os.devnull} if name == "torch 2.15" else {})
    libraries = libraries + (oldest() if name == "oldest" else [])
    command = [*pip, "-e", ".[dev]", *libraries]
    installed = subprocess.run(command, cwd=PROJECT, env=env, capture_output=True, text=True)
    if installed.returncode:
        lines = [line for line in installed.stderr.splitlines() if line.startswith("ERROR")]
        return record | {"result": f"not run: pip: {(lines or ['failed'])[0][:200]}"}
    python = folder / "bin" / "python"
    code = (
        "import json, platform; from importlib.metadata import version as v; "
        f"print(json.dumps({{'python': platform.python_version()}} | {{n: v(n) for n in {SHOWN}}}))"
    )
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    record |= json.loads(found.stdout)
    command = [python, "-m", "pytest", "-n", "3", "--dist", "worksteal", *tests]
    command += ["-p", "no:cacheprovider"]
    ended = subprocess.run(command, cwd=PROJECT, stdout=subprocess.PIPE, text=True)
    print(ended.stdout[-4000:])
    if ended.returncode not in (0, 1):  # 1: tests failed; others: it did not come to its end
        raise SystemExit(f"{name}: pytest ended with {ended.returncode}; nothing is recorded")
    counts = re.findall(r"(\d+) (passed|failed|skipped|error)", ended.stdout.splitlines()[-1])
    return record | {
        "tests": "the whole suite" if tests is WHOLE else "the quick tests",
        "result": ", ".join(f"{int(count):,} {what}" for count, what in counts),
        "failed": re.findall(r"^FAILED (\S+)", ended.stdout, re.MULTILINE),
    }


def table(records):
    """The records as the table of the page."""
    lines = [
        "| | Python | torch | transformers | peft | what was run | on | result |",
        "|" + "---|" * 8,
    ]
    for name in ENVIRONMENTS:
        if name in records:
            record = records[name]
            cells = [record.get(key, "") for key in ("python", *SHOWN, "tests", "day", "result")]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def write(records):
    """The records to their file, and their table to the page."""
    RECORDS.write_text(json.dumps(records, indent=1) + "\n")
    head, _, rest = PAGE.read_text().partition(BEGIN)
    tail = rest.partition(END)[2]
    PAGE.write_text(f"{head}{BEGIN}\n\n{table(records)}\n\n{END}{tail}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help=", ".join(ENVIRONMENTS))
    names = parser.parse_args().names or list(ENVIRONMENTS)
    for name in names:
        if name not in ENVIRONMENTS:
            parser.error(f"{name}: expected one of {', '.join(ENVIRONMENTS)}")
        print(f"== {name}, {platform.platform()}", flush=True)
        records = json.loads(RECORDS.read_text()) if RECORDS.exists() else {}
        write(records | {name: run(name)})


if __name__ == "__main__":
    sys.exit(main())
