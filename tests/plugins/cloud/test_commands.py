"""``surefoot ckpt`` on URLs."""

import json

import pytest

import commands
from checkpoint.sample import sample_states
from surefoot.checkpoint.saving.preparation import save
from surefoot.plugins.cloud.checkpoints import upload
from surefoot.plugins.cloud.store import Store
from surefoot.storage.remote import Address

URL = "memory://runs/tiny"
run, ok, refused = commands.of("ckpt")
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


def test_ls_lists_a_run(store):
    lines = json.loads(ok("ls", URL, "--json"))
    assert [(line["path"], line["step"], line["loss"]) for line in lines] == [
        ("checkpoint-2", 2, 0.25),
        ("checkpoint-4", 4, 0.25),
        ("checkpoint-6", None, None),
    ]
    assert [line["is_best"] for line in lines] == [True, False, False]
    assert "never committed" in lines[2]["problem"]
    assert "latest" in ok("ls", URL)
    assert json.loads(ok("ls", f"{URL}/checkpoint-4", "--json"))[0]["step"] == 4


def test_verify_checks_what_is_in_the_store(store):
    ok("verify", f"{URL}/checkpoint-4")
    ok("ls", URL, "--verify")
    data = bytearray(store.read("checkpoint-4/model.safetensors"))
    data[-1] ^= 1
    store.write("checkpoint-4/model.safetensors", bytes(data))
    said = ok("verify", f"{URL}/checkpoint-4", code=1)
    assert "has changed since it was saved" in said
    ok("verify", "--quick", f"{URL}/checkpoint-4")
    ok("ls", URL, "--verify", code=1)
    store.delete("checkpoint-4/state.json")
    assert "state.json: missing" in ok("verify", "--quick", f"{URL}/checkpoint-4", code=1)


def test_show_and_diff_download_first(store):
    shown = json.loads(ok("show", f"{URL}/checkpoint-2", "--json"))
    assert shown["facts"]["step"] == "2"
    assert "model.norm.weight" in run("diff", f"{URL}/checkpoint-2", f"{URL}/checkpoint-4").stdout


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["verify", "s3://b/run"], "expected the URL of a checkpoint"),
        (["show", "s3://"], "has no folder"),
        (["ls", "s4://b/run"], "unknown scheme"),
    ],
)
def test_a_wrong_url_is_said(arguments, why):
    assert why in refused(*arguments)
