"""Every command of the page about checkpoints is run, on a run like the one it shows."""

import json

import pytest
import torch
from click.testing import CliRunner
from pages import ROOT, SHELLS, blocks, steps, surefoot_commands

from checkpoint.sample import Holder
from surefoot.checkpoint.saving.preparation import save
from surefoot.cli.main import main

PAGE = ROOT / "docs" / "how-to" / "checkpoints.md"
NAME = "base_model.model.model.layers.0.self_attn.v_proj.lora_B.weight"
STEPS = {400: None, 500: None, 564: 0.0028}  # step -> eval_loss
COMMANDS = [
    (arguments, output)
    for block in blocks(PAGE, *SHELLS)
    for line, output in steps(block)
    for arguments in surefoot_commands(line)
]


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """A folder with the run of the page, and two more."""
    monkeypatch.chdir(tmp_path)
    history, parent = [], "checkpoint-300"
    for step, loss in STEPS.items():
        torch.manual_seed(step)
        history.append({"step": step, "loss": 1 / step})
        if loss is not None:
            history.append({"step": step, "eval_loss": loss, "eval_accuracy": 0.9})
        weights = {NAME: torch.randn(128, 16)}
        states = {
            "model": Holder(weights),
            "optimizer": Holder({NAME: {"exp_avg": torch.randn(128, 16)}}),
            "loader": Holder({"epoch": step // 188}),
            "random": Holder({"torch": torch.randint(0, 9, (9,)), "python": [step]}),
        }
        log = {"log_history": history, "best_global_step": 564 if loss else None}
        root = tmp_path / "runs" / "quickstart"
        folder = save(
            root, step, states, kind="adapter", parent=parent,
            companions={"trainer_state.json": json.dumps(log).encode()},
        )  # fmt: skip
        parent = folder.name
    (root / "recipe.yaml").write_text("checkpoint: {keep: 3}")
    for name in ("one", "other"):
        save(tmp_path / "runs" / name, 300, states, kind="adapter")
    return tmp_path


def words(line):
    return line.replace("…", "").split()


@pytest.mark.parametrize(("arguments", "shown"), COMMANDS, ids=[" ".join(c[0]) for c in COMMANDS])
def test_a_command_of_the_page_does_what_it_shows(arguments, shown, desk):
    result = CliRunner().invoke(main, arguments)
    differs = arguments[1] == "diff" and "runs/quickstart/checkpoint-500" in arguments
    assert result.exit_code == (1 if differs else 0), result.output
    if shown:
        printed, expected = result.output.splitlines(), shown.splitlines()
        assert words(printed[0]) == words(expected[0])
        heads = [line for line in expected if line.startswith(("tensor ", "tensors "))]
        assert [words(line) for line in printed if line.startswith(("tensor ", "tensors "))] == [
            words(line) for line in heads
        ]
        if arguments[1] in ("ls", "prune"):
            names = [words(line)[0] for line in expected[1:4]]
            assert [words(line)[0] for line in printed[1:4]] == names
            assert [words(line)[-1] for line in printed[1:4]] == [
                words(line)[-1] for line in expected[1:4]
            ]
