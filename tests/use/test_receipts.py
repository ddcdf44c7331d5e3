"""A receipt says what an artefact was made from; verifying it finds whatever is not so any more."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import commands
import tiny_tokenizers
from damage import flip
from folders import CHATML, save_adapter, save_model
from surefoot.data.text.collation import with_chosen
from surefoot.errors import ModelError
from surefoot.plugins.gguf.targets import GGUF
from surefoot.storage import files
from surefoot.use import export
from surefoot.use.exporting import verification
from surefoot.use.exporting.receipt import NAME, Artefact, identity_of, read_receipt
from surefoot.use.exporting.verification import Cost, compare_texts, logps_of, verify_export

run, ok, refused = commands.of("export")

pytestmark = pytest.mark.filterwarnings("ignore:.*(Token|torch_dtype|deprecated).*")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A base, an adapter of it, and the export of both."""
    folder = tmp_path_factory.mktemp("receipts")
    save_model(folder / "base", "qwen2", vocab_size=410)
    tiny_tokenizers.tokenizer("qwen", chat_template=CHATML).save_pretrained(folder / "base")
    save_adapter(folder / "base", folder / "adapter")
    export(folder / "adapter", folder / "out")
    return folder


@pytest.fixture
def copied(made, tmp_path):
    """The export, to be changed."""
    shutil.copytree(made / "out", tmp_path / "out")
    return tmp_path / "out"


def test_the_receipt_names_checkpoint_base_and_files(made):
    receipt = json.loads((made / "out" / NAME).read_text())
    origin = receipt["made_from"]
    assert origin["checkpoint"] == str(made / "adapter")
    assert origin["base"] == str(made / "base")
    assert {"model.safetensors", "adapter/adapter_model.safetensors"} <= origin["files"].keys()
    assert receipt["artefact"]["type"] == "float32"
    written = {path.name for path in (made / "out").iterdir()} - {NAME, "README.md"}
    assert receipt["files"].keys() == written
    hashed = files.digest((made / "out" / "model.safetensors").read_bytes())
    assert receipt["files"]["model.safetensors"]["hash"] == hashed


def test_an_unchanged_export_passes_and_the_receipt_has_its_figures(copied):
    assert ok("verify", copied)[:9] == "verified:"
    figures = json.loads((copied / NAME).read_text())["verified"]
    assert figures["readers"] == [f"transformers {transformers.__version__}"]
    assert figures["passed"]
    assert figures["loss"] == pytest.approx(figures["checkpoint_loss"], abs=1e-4)
    assert figures["equal_tokens"] == figures["compared_tokens"] > 0


@torch.no_grad()
def test_the_figures_are_those_of_a_plain_loop(made):
    model = AutoModelForCausalLM.from_pretrained(made / "base")
    other = AutoModelForCausalLM.from_pretrained(made / "out")
    probes = [(5, 9, 30, 31, 7), (8, 11, 12)]
    outputs = (logps_of(m, probes) for m in (other, model))
    found = compare_texts(Artefact("huggingface", "w4a16", 1), probes, *outputs).figures
    losses, equal, regrets = [], 0, []
    for probe in probes:
        for i in range(1, len(probe)):
            ids = torch.tensor([probe[:i]])
            own, theirs = (m(ids).logits[0, -1].double().log_softmax(-1) for m in (other, model))
            losses.append(-own[probe[i]].item())
            equal += int(own.argmax() == theirs.argmax())
            regrets.append((theirs.max() - theirs[own.argmax()]).item())
    assert found["loss"] == pytest.approx(sum(losses) / len(losses), abs=1e-5)
    assert (found["equal_tokens"], found["compared_tokens"]) == (equal, 6)
    assert found["regret"] == pytest.approx(sum(regrets) / 6, abs=1e-5)


def test_a_changed_or_missing_file_is_named(copied):
    flip(copied / "model.safetensors", -50)
    (copied / "tokenizer.json").unlink()
    message = refused("verify", copied)
    said = " ".join(message.split())
    assert "model.safetensors has changed since it was exported" in said
    assert "tokenizer.json is missing" in said


def test_weights_that_compute_something_else_are_refused(copied):
    """As if the export itself were wrong: the receipt has the hash of the wrong file."""
    path = copied / "model.safetensors"
    wrong = load_file(path)
    wrong["model.layers.0.mlp.up_proj.weight"] *= 1.5
    save_file(wrong, path, metadata={"format": "pt"})
    content = json.loads((copied / NAME).read_text())
    content["files"][path.name] = {"size": path.stat().st_size, "hash": identity_of(path).hash}
    (copied / NAME).write_text(json.dumps(content))
    assert "does not compute what its checkpoint does" in refused("verify", copied, code=1)
    assert json.loads((copied / NAME).read_text())["verified"]["passed"] is False


def test_a_moved_checkpoint_and_base_can_be_named(copied, made, tmp_path):
    for name in ("base", "adapter"):
        shutil.copytree(made / name, tmp_path / name)
    content = json.loads((copied / NAME).read_text())
    content["made_from"] |= {"checkpoint": "/gone/adapter", "base": "/gone/base"}
    (copied / NAME).write_text(json.dumps(content))
    with pytest.raises(ModelError, match=r"/gone/adapter, .*name it with --checkpoint"):
        verify_export(copied)
    with pytest.raises(ModelError, match=r"/gone/base, .*name it with --base"):
        verify_export(copied, checkpoint=tmp_path / "adapter")
    assert verify_export(copied, checkpoint=tmp_path / "adapter", base=tmp_path / "base").is_within


def test_another_base_or_checkpoint_is_not_compared_with(copied, made, tmp_path):
    other = save_model(tmp_path / "other", "qwen2", vocab_size=410, seed=7)
    with pytest.raises(ModelError, match=r"other: is not what .* exported from .*--base"):
        verify_export(copied, base=other)
    save_adapter(made / "base", tmp_path / "adapter", seed=5)
    with pytest.raises(ModelError, match=r"adapter: is not what .* exported from .*--checkpoint"):
        verify_export(copied, checkpoint=tmp_path / "adapter")


def test_a_preference_pair_counts_as_its_chosen_conversation():
    pair = {"input_ids": [1, 2, 3, 4, 5], "labels": [-100, -100, 3, 4, 5], "lengths": [2, 1, 2]}
    found = {name: list(part) for name, part in with_chosen(pair).items()}
    assert found == {"input_ids": [1, 2, 3], "labels": [-100, -100, 3]}
    plain = {"input_ids": [1, 2], "labels": [-100, 2]}
    assert with_chosen(plain) == plain


def test_without_a_receipt_the_cure_is_named(copied):
    (copied / NAME).unlink()
    with pytest.raises(ModelError, match=r"has no receipt.json; .*export the model again"):
        verify_export(copied)
    (copied / NAME).write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        verify_export(copied)


def test_gguf_is_opened_by_transformers(made, tmp_path, monkeypatch):
    out = export(made / "adapter", tmp_path / "out.gguf", GGUF(quantize="q8_0"))
    result = verify_export(out)
    assert result.is_within
    assert result.bound == 0.1
    assert read_receipt(out).verified["passed"]
    with pytest.raises(ModelError, match="nothing is overwritten"):
        out.unlink()
        (tmp_path / "out.Modelfile").unlink()
        export(made / "adapter", out, GGUF(quantize="q8_0"))
    monkeypatch.setattr(verification, "PACKAGES", {"gguf": "no_such_package"})
    with pytest.raises(ModelError, match=r"no-such-package.* not installed: pip install no_such"):
        verify_export(out)


def test_the_command_says_what_it_does_not_verify(made, tmp_path, monkeypatch):
    done = run(made / "base", tmp_path / "plain", "--no-verify")
    assert done.stdout == f"wrote {tmp_path / 'plain'}\n"
    monkeypatch.setattr(verification, "verification_cost", lambda out: Cost(36 * 10**9, 10**9))
    done = run(made / "base", tmp_path / "large")
    assert "takes 36.0 GB of memory, 1.0 GB are free" in done.stderr
    assert done.exit_code == 0


def test_a_gguf_adapter_is_written_and_said_not_to_be_verified(made, tmp_path):
    done = run(made / "adapter", tmp_path / "a.gguf", "--to", "gguf-adapter")
    assert done.exit_code == 0
    assert "not verified: no package of Python opens an adapter in GGUF" in done.stderr
    assert read_receipt(tmp_path / "a.gguf").verified is None
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="has changed since it was exported"):
        verify_export(tmp_path / "a.gguf")
