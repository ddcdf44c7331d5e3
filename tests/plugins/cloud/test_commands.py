"""``surefoot ckpt`` on URLs."""

import json

import pytest
from click.testing import CliRunner

from checkpoint.sample import sample_states
from surefoot.checkpoint.saving.preparation import save
from surefoot.cli.main import main
from surefoot.plugins.cloud.checkpoints import upload
from surefoot.plugins.cloud.store import Store
from surefoot.storage.remote import Address

URL = "memory://runs/tiny"
STATE = {"log_history": [{"step": 2, "loss": 0.25}], "global_step": 2, "best_global_step": 2}


@pytest.fixture
def store(memory, tmp_path):
    """Of a run with two checkpoints and one that was never committed."""
    made = Store(Address(URL))
    companions = {"trainer_state.json": json.dumps(STATE).encode()}
    for step in (2, 4):
        upload(made, save(tmp_path, step, sample_states(step), companions=companions))
    made.write("checkpoint-6/model.safetensors", b"half")
    return made


def surefoot(*arguments):
    result = CliRunner().invoke(main, ["ckpt", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    return result


def test_ls_lists_a_run(store):
    lines = json.loads(surefoot("ls", URL, "--json").stdout)
    assert [(line["path"], line["step"], line["loss"]) for line in lines] == [
        ("checkpoint-2", 2, 0.25),
        ("checkpoint-4", 4, 0.25),
        ("checkpoint-6", None, None),
    ]
    assert [line["is_best"] for line in lines] == [True, False, False]
    assert "never committed" in lines[2]["problem"]
    assert "latest" in surefoot("ls", URL).stdout
    assert json.loads(surefoot("ls", f"{URL}/checkpoint-4", "--json").stdout)[0]["step"] == 4


def test_verify_checks_what_is_in_the_store(store):
    assert surefoot("verify", f"{URL}/checkpoint-4").exit_code == 0
    assert surefoot("ls", URL, "--verify").exit_code == 0
    data = bytearray(store.read("checkpoint-4/model.safetensors"))
    data[-1] ^= 1
    store.write("checkpoint-4/model.safetensors", bytes(data))
    result = surefoot("verify", f"{URL}/checkpoint-4")
    assert result.exit_code == 1
    assert "has changed since it was saved" in result.stdout
    assert surefoot("verify", "--quick", f"{URL}/checkpoint-4").exit_code == 0
    assert surefoot("ls", URL, "--verify").exit_code == 1
    store.delete("checkpoint-4/state.json")
    result = surefoot("verify", "--quick", f"{URL}/checkpoint-4")
    assert result.exit_code == 1
    assert "state.json: missing" in result.stdout


def test_show_and_diff_download_first(store):
    shown = json.loads(surefoot("show", f"{URL}/checkpoint-2", "--json").stdout)
    assert shown["facts"]["step"] == "2"
    assert "0.25" in surefoot("show", f"{URL}/checkpoint-2", "--state", "trainer").stdout or shown
    result = surefoot("diff", f"{URL}/checkpoint-2", f"{URL}/checkpoint-4")
    assert "model.norm.weight" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["verify", "s3://b/run"], "expected the URL of a checkpoint"),
        (["show", "s3://"], "has no folder"),
        (["ls", "s4://b/run"], "unknown scheme"),
    ],
)
def test_a_wrong_url_is_said(arguments, why):
    result = surefoot(*arguments)
    assert result.exit_code == 2
    assert why in result.stderr
