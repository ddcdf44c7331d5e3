"""The section about debugging a save: its commands stop in pdb where its table says."""

import re
import subprocess
import sys

from pages import ROOT, blocks

from project import Project

PAGE = ROOT / "docs" / "how-to" / "checkpoints.md"
CHAIN = re.compile(r"^\| `(\w+)` \| \[\w+\.py\]\(\.\./\.\./(\S+)\)", re.MULTILINE)


def test_a_breakpoint_in_a_save_shows_the_functions_of_the_table(tmp_path):
    project = Project(tmp_path, train={"max_steps": 1})
    (typed,) = [block.text for block in blocks(PAGE, "text") if block.title == "pdb"]
    command = ["-m", "pdb", "-m", "surefoot", "train"]
    done = subprocess.run(
        [sys.executable, *command, project.recipe, "checkpoint.async_save=false"],
        input=f"{typed}q\n",
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    shown = re.findall(r"(src/surefoot/\S+\.py)\(\d+\)(\w+)\(", done.stdout)
    stack = iter(shown[-20:])
    chain = [(file, function) for function, file in CHAIN.findall(PAGE.read_text())]
    assert len(chain) == 8
    assert [stop for stop in chain if stop not in stack] == [], done.stdout  # `in` reads up to it
    assert "model.safetensors" in done.stdout
    assert not list(tmp_path.rglob("checkpoint-1"))
