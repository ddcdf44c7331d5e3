"""Uploads to hubs: private, resumed, compared with what is there, and without secrets."""

import json
import shutil

import pytest
from huggingface_hub import constants

import commands
import surefoot
from damage import flip
from folders import save_recipe
from hub_server import serving
from surefoot.checkpoint.verification import verify_checkpoint
from surefoot.errors import CheckpointError, ModelError
from surefoot.plugins.cloud.pushing import Destination, push
from surefoot.storage.remote import OFFLINE, HubError
from surefoot.use import export, open_model

# huggingface_hub 2.4 hands files to httpx in a way that httpx deprecates
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
NAME = "me/orders"
TOKEN = "hf_" + "a" * 30


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A LoRA run with checkpoints 2 and 4, and its base, which has a license."""
    folder = tmp_path_factory.mktemp("project")
    recipe = save_recipe(
        folder,
        method={"lora": {"rank": 2}},
        generate={"stop": [TOKEN]},
        train={"max_steps": 4, "eval_steps": 2},
    )
    (folder / "model" / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Base\n")
    (folder / "model" / "LICENSE").write_text("Apache License\n")
    surefoot.train(recipe)
    return folder


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """An empty hub."""
    for name in OFFLINE:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with serving() as (found, url):
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(
            constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            url + "/{repo_id}/resolve/{revision}/{filename}",
        )
        monkeypatch.setenv("HF_TOKEN", "secret-of-hugging-face")
        found.url = url
        yield found


def target(**changes):
    return Destination(**{"name": NAME, **changes})


def files(hub):
    return hub.repositories[("models", NAME)]


def test_a_run_is_uploaded_and_opens(project, hub, tmp_path):
    push(project / "run", target())
    found = files(hub)
    assert hub.private[("models", NAME)]
    assert "adapter_model.safetensors" in found
    assert "loss.png" in found
    assert found["LICENSE"] == b"Apache License\n"
    assert not {"optimizer.safetensors", "state.json", "manifest.json"} & set(found)
    for path, data in found.items():
        (tmp_path / "copy").mkdir(exist_ok=True)
        (tmp_path / "copy" / path).write_bytes(data)
    assert open_model(tmp_path / "copy", base=project / "model")
    card = found["README.md"].decode()
    for said in ("license: apache-2.0", "library_name: peft", "eval_loss", "## Recipe", "`sums`"):
        assert said in card
    state = json.loads((project / "run" / "checkpoint-4" / "state.json").read_text())
    assert state["loader"]["dataset"] in card
    everything = b"".join(found.values()).decode(errors="replace")
    assert TOKEN not in everything
    assert str(project) not in everything
    hub.commits.clear()
    push(project / "run", target())  # again: nothing is sent
    assert not hub.commits


def test_an_interrupted_upload_sends_nothing_twice(project, hub):
    hub.cuts, hub.lost_answers = [300, 600], 1
    with pytest.raises(HubError, match=r"connection lost .* the same command continues"):
        push(project / "run", target(), checkpoints=True)
    push(project / "run", target(), checkpoints=True)
    complete = [name for name, size in hub.received if len(hub.blobs[name]) == size]
    assert len(complete) == len(set(complete)) == len(hub.blobs)
    assert len(hub.commits) == 1
    assert "checkpoint-2/optimizer.safetensors" in files(hub)


def test_checkpoints_verify_and_resume_from_the_hub(project, hub, tmp_path):
    push(project / "run", target(), checkpoints=True)
    for path, data in files(hub).items():
        (tmp_path / "run" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / path).write_bytes(data)
    for step in (2, 4):
        assert verify_checkpoint(tmp_path / "run" / f"checkpoint-{step}", full=True).ok


def test_a_repository_of_somebody_else_is_not_changed(project, hub):
    hub.repositories[("models", NAME)] = {"config.json": b"{}", "model.safetensors": b"x"}
    hub.private[("models", NAME)] = True
    before = dict(files(hub))
    for dry_run in (True, False):
        with pytest.raises(
            ModelError, match=r"holds something else \(config.json, model.safetensors\)"
        ):
            push(project / "run", target(), dry_run=dry_run)
    assert files(hub) == before
    push(project / "run", target(replaces=True))
    assert files(hub)["config.json"] == b"{}"
    assert "adapter_model.safetensors" in files(hub)


def test_a_public_repository_is_not_used_for_what_is_private(project, hub):
    push(project / "run", target(is_private=False))
    assert not hub.private[("models", NAME)]
    with pytest.raises(ModelError, match="exists and is public"):
        push(project / "run" / "checkpoint-2", target())


def test_a_later_checkpoint_replaces_an_earlier_one_but_no_edits(project, hub):
    push(project / "run" / "checkpoint-2", target())
    files(hub)["README.md"] += b"A note of mine.\n"
    before = files(hub)["adapter_model.safetensors"]
    for _ in range(2):  # the second one, too, knows the card that it has not uploaded
        plan = push(project / "run", target())
        assert "README.md was edited in the repository, and is left" in plan.notes[-1]
        assert files(hub)["README.md"].endswith(b"A note of mine.\n")
    assert files(hub)["adapter_model.safetensors"] != before
    files(hub)["adapter_config.json"] = b"{}"  # somebody edits what must not differ
    with pytest.raises(ModelError, match=r"something else \(adapter_config.json\)"):
        push(project / "run", target())
    assert files(hub)["adapter_config.json"] == b"{}"


def test_a_marker_of_something_else_is_no_upload_of_a_run(project, hub):
    push(project / "run", target())
    for marker in (b"[]", b'{"format": "surefoot-upload"}', b'{"files": 1}', b"{"):
        files(hub)["surefoot.json"] = marker
        with pytest.raises(ModelError, match="holds something else"):
            push(project / "run", target())


def test_a_dry_run_changes_nothing(project, hub):
    plan = push(project / "run", target(), dry_run=True)
    assert plan.is_new
    assert {file.path for file in plan.files} >= {"README.md", "adapter_model.safetensors"}
    assert not hub.repositories


def test_without_a_network_nothing_is_uploaded(project, hub, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE is set, so nothing can be uploaded"):
        push(project / "run", target())
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(constants, "ENDPOINT", "http://localhost:9")
    with pytest.raises(HubError, match="http://localhost:9: connection lost"):
        push(project / "run", target())


def test_the_command_shows_what_it_would_upload(project, hub):
    words = ["push", project / "run", NAME]
    said = commands.ok(*words, "--dry-run")
    for part in ("adapter_model.safetensors", f"to {hub.url}", "a new private repository"):
        assert part in said
    assert "uploaded" in commands.run(*words).output


def test_the_base_of_an_adapter_is_named_by_its_id(project, hub):
    plan = push(project / "run", target(), dry_run=True)
    assert any("--base" in said for said in plan.notes)
    push(project / "run", target(base="org/base"))
    found = json.loads(files(hub)["adapter_config.json"])
    assert found["base_model_name_or_path"] == "org/base"
    assert "base_model: org/base" in files(hub)["README.md"].decode()


def test_files_that_are_not_part_of_the_model_any_more_are_removed(project, hub, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(project / "run", run)
    push(run, target())
    (run / "loss.png").unlink()
    files(hub)["notes.txt"] = b"somebody's"
    drawn, files(hub)["loss.png"] = files(hub)["loss.png"], b"edited"
    assert not push(run, target(), dry_run=True).removed
    files(hub)["loss.png"] = drawn
    plan = push(run, target())
    assert plan.removed == ["loss.png"]
    assert "loss.png" not in files(hub)
    assert files(hub)["notes.txt"] == b"somebody's"


def test_an_export_without_a_run_is_uploaded_with_a_card(project, hub, tmp_path):
    """The short one that the export has left is replaced, and one of somebody's own is not."""
    export(project / "run", tmp_path / "export")
    push(tmp_path / "export", target(license="mit"))
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= set(files(hub))
    assert "license: mit" in files(hub)["README.md"].decode()
    (tmp_path / "export" / "README.md").write_text("mine")
    hub.repositories.clear()
    push(tmp_path / "export", target(license="mit"))
    assert files(hub)["README.md"] == b"mine"


def test_an_export_that_is_not_what_was_verified_is_not_uploaded(project, hub, tmp_path):
    out = export(project / "run", tmp_path / "export")
    content = json.loads((out / "generation_config.json").read_text())
    (out / "generation_config.json").write_text(json.dumps({**content, "eos_token_id": 1}))
    with pytest.raises(ModelError, match=r"generation_config\.json has changed.*delete receipt"):
        push(out, target())
    assert not hub.repositories
    (out / "receipt.json").unlink()
    push(out, target())
    assert b'"eos_token_id": 1' in files(hub)["generation_config.json"]


@pytest.mark.parametrize("name", ["adapter_config.json", "modeling.py", "more.safetensors"])
def test_what_was_added_to_an_export_and_would_be_opened_is_not_uploaded(
    project, hub, tmp_path, name
):
    out = export(project / "run", tmp_path / "export")
    (out / "notes.txt").write_text("mine")  # no program opens it
    push(out, target(), dry_run=True)
    (out / name).write_text("{}")
    with pytest.raises(ModelError, match=rf"{name} was added since it was exported"):
        push(out, target())
    assert not hub.repositories


def test_without_a_token_the_cure_is_named(project, hub, monkeypatch):
    hub.needs_token = True
    monkeypatch.setenv("HF_TOKEN", "wrong")
    with pytest.raises(HubError, match="HF_TOKEN"):
        push(project / "run", target())


def test_the_hubs_own_reason_is_named(project, hub):
    """A full quota is a 403, as a token without write access is."""
    hub.refuses_uploads = "Private repository storage limit reached, please upgrade your plan."
    with pytest.raises(HubError, match=r"403: .*storage limit reached"):
        push(project / "run", target())


def test_damaged_weights_and_wrong_names_are_refused(project, hub, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(project / "run", run)
    flip(run / "checkpoint-4" / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="it is not uploaded"):
        push(run / "checkpoint-4", target())
    with pytest.raises(ModelError, match="expected owner/name"):
        push(project / "run", target(name="orders"))
    with pytest.raises(ModelError, match="no folder"):
        push(tmp_path / "nothing", target())


@pytest.fixture
def own_hub(monkeypatch):
    """One that a process of its own reaches, and which wants a token."""
    for name in OFFLINE:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.setenv("HF_TOKEN", "secret-of-hugging-face")
    with serving() as (hub, url):
        monkeypatch.setenv("HF_ENDPOINT", url)
        hub.needs_token = True
        yield hub


def test_a_run_uploads_itself(tmp_path, own_hub, caplog):
    caplog.set_level("INFO")
    recipe = save_recipe(tmp_path, method={"lora": {"rank": 2}}, checkpoint={"save_steps": 4})
    surefoot.train(recipe, train={"max_steps": 2})
    # a resumed run may begin to upload
    surefoot.train(recipe, train={"push_to_hub": NAME, "hub_strategy": "every_save"})
    assert "adapter_model.safetensors" in files(own_hub)
    assert own_hub.private[("models", NAME)]
    assert f"uploaded to {NAME}" in caplog.text


def test_a_run_is_not_stopped_by_a_hub(tmp_path, own_hub, monkeypatch, caplog):
    monkeypatch.setenv("HF_TOKEN", "wrong")
    recipe = save_recipe(tmp_path, method={"lora": {"rank": 2}}, train={"push_to_hub": NAME})
    outcome = surefoot.train(recipe, train={"max_steps": 1, "hub_strategy": "end"})
    assert outcome.state.is_complete
    (said,) = [r.message for r in caplog.records if "not uploaded" in r.message]
    assert "HF_TOKEN" in said
    assert said.endswith(f"surefoot push {tmp_path / 'run'} {NAME}")
