import asyncio
import json
import os
import sys

import pytest
from click.testing import CliRunner

from board.runs import COMPLETE, RECIPE, write_run
from surefoot.board.board import open_board
from surefoot.cli.main import main

pytest.importorskip("mcp", reason="needs the package mcp")
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters

from board.serving import SOURCE
from surefoot.board.agents.server import create_server

WRITES = {"tag_run", "pin_checkpoint", "start_run", "stop_run", "resume_run"}
WRITES |= {"prune_checkpoints", "export_model"}


@pytest.fixture
def root(tmp_path):
    write_run(tmp_path / "root/runs/one", end=COMPLETE)
    write_run(tmp_path / "root/runs/two", recipe=RECIPE.replace("1.0e-3", "2.0e-3"))
    write_run(tmp_path / "outside")
    (tmp_path / "root/mine.yaml").write_text(RECIPE)
    return tmp_path / "root"


def calling(server, *calls):
    """The tools by name, and the results of calls: the data, or the text of an error."""

    async def talk():
        async with Client(server) as client:
            tools = {tool.name: tool for tool in (await client.list_tools()).tools}
            found = [await client.call_tool(name, given) for name, given in calls]
            return tools, found

    tools, found = asyncio.run(talk())
    return tools, [
        one.content[0].text if one.is_error else json.loads(one.content[0].text) for one in found
    ]


def test_an_agent_reads_what_the_pages_show(root):
    tools, (table, some, run, curves, differing, checked, edited) = calling(
        create_server(open_board(root)),
        ("list_runs", {}),
        ("list_runs", {"words": "complete lora"}),
        ("show_run", {"run": "runs/one"}),
        ("read_curves", {"run": "runs/one", "names": ["loss"], "points": 10, "smooth": 2}),
        ("compare_recipes", {"run": "runs/one", "other": "runs/two"}),
        ("check_recipe", {"text": RECIPE.replace("max_steps", "max_step")}),
        ("edit_recipe", {"text": RECIPE, "keys": ["train", "max_steps"], "value": 7}),
    )
    assert {row["run"]: row["state"] for row in table["runs"]} == {
        "runs/one": "complete",
        "runs/two": "died",
    }
    assert [row["run"] for row in some["runs"]] == ["runs/one"]
    assert run["row"]["step"] == 20
    assert curves["series"]["loss"]["steps"][-1] == 20
    assert differing["changes"][0]["path"] == "optim.adamw.learning_rate"
    assert "did you mean max_steps" in checked["problems"][0]["message"]
    assert "max_steps: 7" in edited["text"]
    assert not tools.keys() & WRITES
    assert all(tool.annotations.read_only_hint and tool.description for tool in tools.values())


def test_an_agent_that_may_not_write_cannot_and_no_path_leaves_the_root(root):
    _, answers = calling(
        create_server(open_board(root)),
        ("tag_run", {"run": "runs/one", "add": ["mine"]}),
        ("start_run", {"text": RECIPE, "file": "new.yaml"}),
        ("show_run", {"run": "../outside"}),
        ("read_recipe", {"file": "/etc/passwd"}),
        ("plan", {"file": "../outside/recipe.yaml"}),
        ("read_samples", {"run": "runs/one", "file": "../two/recipe.yaml"}),
        ("verify_checkpoint", {"run": "runs/one", "checkpoint": "../two/checkpoint-1"}),
        ("read_curves", {"run": "runs/one", "names": ["loss"], "points": 10**9}),
    )
    for answer, said in zip(
        answers,
        ["tag_run", "start_run", *["is outside"] * 3, None, "is not a checkpoint", "2000"],
        strict=True,
    ):
        assert answer["rows"] == [] if said is None else said in answer, answer
    assert not (root / "new.yaml").exists()
    assert not (root / "runs/one/tags.json").exists()


def test_an_agent_that_may_write_tags_runs_and_gets_the_errors_of_commands(root):
    tools, (tags, taken, pruned, bad) = calling(
        create_server(open_board(root), may_write=True),
        ("tag_run", {"run": "runs/one", "add": ["mine"]}),
        ("start_run", {"text": RECIPE.replace("100", "9"), "file": "mine.yaml"}),
        ("prune_checkpoints", {"run": "runs/one", "keep": 1}),
        ("tag_run", {"run": "runs/one", "add": ["a b"]}),
    )
    assert tools.keys() >= WRITES
    assert not any(tools[name].annotations.read_only_hint for name in WRITES)
    assert tags == {"tags": ["mine"]}
    assert "another text" in taken
    assert "no complete Surefoot checkpoint" in pruned
    assert "without spaces" in bad


def test_the_command_speaks_over_standard_input_and_output(root):
    command = StdioServerParameters(
        command=sys.executable,
        args=["-m", "surefoot", "mcp", str(root)],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )
    _, (found,) = calling(command, ("show_run", {"run": "runs/one"}))
    assert found["row"]["state"] == "complete"


def test_a_missing_package_is_said(root, monkeypatch):
    monkeypatch.delitem(sys.modules, "surefoot.board.agents.server", raising=False)
    monkeypatch.setitem(sys.modules, "mcp.server.mcpserver", None)
    result = CliRunner().invoke(main, ["mcp", str(root)])
    assert result.exit_code == 2
    assert "pip install 'surefoot[mcp]'" in result.output
