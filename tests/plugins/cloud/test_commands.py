"""``surefoot ckpt`` on URLs."""

import json

import pytest
from click.testing import CliRunner

from checkpoint.sample import sample_states
from surefoot.checkpoint.saving.preparation import save
from surefoot.cli.main import main
from surefoot.plugins.cloud.checkpoints import upload
from surefoot.plugins.cloud.store import Store
from surefoot.storage.address import Address

STATE = {"log_history": [{"step": 2, "loss": 0.25}], "global_step": 2, "best_global_step": 2}


@pytest.fixture
def url(bucket, tmp_path):
    """A run with two checkpoints and one that was never committed."""
    store = Store(Address(bucket.url))
    companions = {"trainer_state.json": json.dumps(STATE).encode()}
    for step in (2, 4):
        upload(store, save(tmp_path, step, sample_states(step), companions=companions))
    bucket.put("checkpoint-6/model.safetensors", b"half")
    return bucket.url


def surefoot(*arguments):
    result = CliRunner().invoke(main, ["ckpt", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    return result


def test_ls_lists_a_run(url):
    lines = json.loads(surefoot("ls", url, "--json").stdout)
    assert [(line["path"], line["step"], line["loss"]) for line in lines] == [
        ("checkpoint-2", 2, 0.25),
        ("checkpoint-4", 4, 0.25),
        ("checkpoint-6", None, None),
    ]
    assert [line["is_best"] for line in lines] == [True, False, False]
    assert "never committed" in lines[2]["problem"]
    assert "latest" in surefoot("ls", url).stdout
    assert json.loads(surefoot("ls", f"{url}/checkpoint-4", "--json").stdout)[0]["step"] == 4


def test_verify_checks_what_is_in_the_store(url, bucket):
    assert surefoot("verify", f"{url}/checkpoint-4").exit_code == 0
    assert surefoot("ls", url, "--verify").exit_code == 0
    data = bytearray(bucket.get("checkpoint-4/model.safetensors"))
    data[-1] ^= 1
    bucket.put("checkpoint-4/model.safetensors", bytes(data))
    result = surefoot("verify", f"{url}/checkpoint-4")
    assert result.exit_code == 1
    assert "has changed since it was saved" in result.stdout
    assert surefoot("verify", "--quick", f"{url}/checkpoint-4").exit_code == 0
    assert surefoot("ls", url, "--verify").exit_code == 1
    bucket.delete("checkpoint-4/state.json")
    result = surefoot("verify", "--quick", f"{url}/checkpoint-4")
    assert result.exit_code == 1
    assert "state.json: missing" in result.stdout


def test_show_and_diff_download_first(url):
    shown = json.loads(surefoot("show", f"{url}/checkpoint-2", "--json").stdout)
    assert shown["facts"]["step"] == "2"
    assert "0.25" in surefoot("show", f"{url}/checkpoint-2", "--state", "trainer").stdout or shown
    result = surefoot("diff", f"{url}/checkpoint-2", f"{url}/checkpoint-4")
    assert "model.norm.weight" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["verify", "s3://b/run"], "expected the URL of a checkpoint"),
        (["show", "s3://"], "has no folder"),
        (["ls", "s4://b/run"], "unknown scheme"),
    ],
)
def test_a_wrong_url_is_said(bucket, arguments, why):
    result = surefoot(*arguments)
    assert result.exit_code == 2
    assert why in result.stderr
