"""The benchmarks stand, and what they found is written down. Nothing is timed here."""

import ast
import re
import sys
from pathlib import Path

import pytest

import warm

FOLDER = Path(__file__).parent.parent / "benchmarks"
BENCHMARKS = ["startup.py", "shares.py", "encode.py", "reshard.py", "ranks.py", "commits.py"]
BENCHMARKS += ["train.py", "overhead.py", "preference.py", "dealing.py", "layers_in_turn.py"]
BENCHMARKS += [
    "grpo.py",
    "harness.py",
    "gguf_export.py",
    "serve.py",
    "pictures.py",
    "restart.py",
    "manifest.py",
]
FILES = sorted(
    f for f in FOLDER.rglob("*.py") if not any(part.startswith(".venv-") for part in f.parts)
)
PROGRAMS = sorted(
    f.name for f in FILES if "ArgumentParser(" in f.read_text() and f.parent == FOLDER
)
RESULTS = (FOLDER / "RESULTS.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(FOLDER)))
def test_a_file_parses_and_says_what_it_is(file):
    assert ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_benchmark_is_importable_and_explains_itself_without_its_peers(name):
    file = FOLDER / name
    done = warm.run(
        [sys.executable, file, "--help"], capture_output=True, text=True, cwd=file.parent
    )
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout


def test_a_benchmark_that_times_says_how_busy_the_machine_was():
    clocks = re.compile(r"time\.(monotonic|perf_counter|process_time)|import .*\btimed\b")
    texts = {file.name: file.read_text() for file in FOLDER.glob("*.py")}
    timing = {name for name, text in texts.items() if clocks.search(text) and "def main" in text}
    assert timing
    assert not {name for name in timing if "machine()" not in texts[name]}


@pytest.mark.parametrize("name", BENCHMARKS)
def test_results_give_the_command_of_every_benchmark(name):
    assert re.search(rf"^\.venv/bin/python benchmarks/{name}\b", RESULTS, re.MULTILINE)


def test_results_are_dated_and_name_the_machine():
    assert re.search(r"\b20\d\d-\d\d-\d\d\b", RESULTS)
    assert "2 cores" in RESULTS


@pytest.mark.parametrize(
    "name",
    [
        "requirements.txt",
        "requirements-mindspore.txt",
        "requirements-transformers-4.txt",
        "gpu/requirements.txt",
    ],
)
def test_every_peer_is_pinned(name):
    lines = (FOLDER / name).read_text(encoding="utf-8").splitlines()
    wanted = [line for line in lines if line and not line.startswith("#")]
    assert wanted
    assert all(re.fullmatch(r"[\w-]+==[\w.]+", line) for line in wanted)
