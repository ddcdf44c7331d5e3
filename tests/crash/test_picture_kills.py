"""A run with pictures that is killed at each of its saves ends in the bits of one that was not."""

import base64
import json
import shutil
import signal

import pytest
from safetensors.torch import load_file

import pictures
import surefoot
from project import assert_same, checkpoints, in_child, losses
from surefoot.checkpoint.verification import verify

STEPS = 3
MOMENTS = {"begun": ".checkpoint-{}.*.part", "ended": "checkpoint-{}"}  # of a save


def project(folder, base, **changes):
    """Rows of text and of pictures; every third one has the bytes of its pictures."""
    folder.mkdir()
    rows = pictures.rows(folder, 12)
    for row in rows[::3]:
        data = base64.b64encode((folder / rows[1]["images"][0]).read_bytes()).decode()
        row["images"] = [f"data:image/png;base64,{data}"]
        row["messages"][0]["content"] += "<image>"
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    train = {"max_steps": STEPS, "log_steps": 1, "output_dir": str(folder / "run")}
    optim = {"adamw": {"learning_rate": 1e-2}}
    return pictures.recipe(
        folder, base, train=train, checkpoint={"save_steps": 1}, optim=optim, **changes
    )


def final_state(run):
    """All tensors of the last checkpoint: weights, optimizer, and where the run is."""
    (*_, newest) = checkpoints(run)
    assert newest.name == f"checkpoint-{STEPS}"
    assert verify(newest, full=True).ok
    files = sorted(newest.glob("*.safetensors"))
    return {f"{file.name}: {n}": t for file in files for n, t in load_file(file).items()}


def killed_at_every_save(recipe, pattern, *, has_cache):
    """Start the same recipe until it ends, killed at one save after the other; how often it was."""
    run, kills = recipe.train.folder, 0
    for step in range(1, STEPS + 1):
        at = pattern.format(step)
        code = in_child(lambda: surefoot.train(recipe), kill_when=lambda at=at: any(run.glob(at)))
        assert code == -signal.SIGKILL or step == STEPS, "it ended by itself"
        kills += code == -signal.SIGKILL
        if not has_cache:
            shutil.rmtree(recipe.data.cache_dir)
    assert in_child(lambda: surefoot.train(recipe)) == 0
    return kills


def assert_no_worse_for_kills(tmp_path, kind, moment, *, has_cache, **changes):
    base = pictures.save_model(tmp_path / "base", kind)
    whole = project(tmp_path / "whole", base, **changes)
    assert in_child(lambda: surefoot.train(whole)) == 0
    killed = project(tmp_path / "killed", base, **changes)
    assert killed_at_every_save(killed, MOMENTS[moment], has_cache=has_cache) >= STEPS - 1
    assert losses(killed.train.folder) == losses(whole.train.folder)
    assert_same(final_state(killed.train.folder), final_state(whole.train.folder))


@pytest.mark.proof
def test_killed_at_every_save_without_its_token_cache_it_ends_in_the_same_bits(tmp_path):
    assert_no_worse_for_kills(tmp_path, "qwen2_vl", "begun", has_cache=False)


@pytest.mark.proof
@pytest.mark.parametrize("has_cache", [True, False], ids=["cache", "no cache"])
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("form", ["packed", "padded", "streamed"])
@pytest.mark.parametrize("kind", pictures.KINDS)
def test_proof_of_kills_at_every_save(kind, form, moment, has_cache, tmp_path):
    changes = {"packing": form != "padded", "streaming": form == "streamed"}
    assert_no_worse_for_kills(tmp_path, kind, moment, has_cache=has_cache, **changes)


@pytest.mark.proof
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("kind", pictures.KINDS)
def test_proof_of_kills_with_adapters_in_the_tower(kind, moment, tmp_path):
    method = {"lora": {"rank": 2, "dropout": 0.1, "parts": ["tower", "language"]}}
    assert_no_worse_for_kills(tmp_path, kind, moment, has_cache=True, method=method)
