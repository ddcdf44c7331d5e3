"""The export command."""

import shutil
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import commands
import tiny_tokenizers
from folders import CHATML, save_adapter, save_model
from surefoot.use import open_model

run, ok, refused = commands.of("export")

IDS = torch.arange(60, 76)[None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    save_model(folder / "base")
    save_adapter(folder / "base", folder / "adapter")
    return folder


def test_an_adapter_becomes_a_model_of_its_own(folder, tmp_path):
    assert ok(folder / "adapter", tmp_path / "out").splitlines()[0] == f"wrote {tmp_path / 'out'}"
    expected = open_model(folder / "adapter").model(IDS).logits
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()(IDS).logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template


def test_a_file_of_llamafactory_alone_is_answered_with_the_command_to_type(tmp_path):
    file = tmp_path / "merge.yaml"
    file.write_text("model_name_or_path: base\nadapter_name_or_path: ad\nexport_dir: out\n")
    assert "type: surefoot export ad out --base base" in refused(file)
    assert "Missing argument 'OUT'" in run(tmp_path).stderr


@pytest.mark.parametrize("options", [(), ("--to", "compressed-tensors")])
def test_a_folder_is_not_given_the_name_of_a_gguf_file(options, folder, tmp_path):
    message = refused(folder / "base", tmp_path / "x.gguf", *options)
    assert "writes a folder; add --to gguf" in message
    assert not (tmp_path / "x.gguf").exists()


def test_type_and_shards_are_as_asked(folder, tmp_path):
    options = ["--dtype", "bfloat16", "--max-shard-size", "40KB", "--base", folder / "base"]
    assert run(folder / "adapter", tmp_path / "out", *options).exit_code == 0
    shards = list((tmp_path / "out").glob("model-*.safetensors"))
    assert len(shards) > 1
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


def test_what_does_not_verify_is_deleted(folder, tmp_path):
    """Rounding to bfloat16 changes logits of thousands by more than its bound allows."""
    model = AutoModelForCausalLM.from_pretrained(folder / "base")
    model.lm_head.weight.data *= 1e5
    shutil.copytree(folder / "base", tmp_path / "sharp")
    model.save_pretrained(tmp_path / "sharp")
    (tmp_path / "new").mkdir()
    message = refused(tmp_path / "sharp", tmp_path / "new" / "out", "--dtype", "bfloat16", code=1)
    assert "out is deleted; --no-verify writes it" in message
    assert list((tmp_path / "new").iterdir()) == []
    ok(tmp_path / "sharp", tmp_path / "out", "--dtype", "bfloat16", "--no-verify")
    assert run("verify", tmp_path / "out").exit_code == 1
    assert (tmp_path / "out").is_dir()


@pytest.mark.parametrize("size", ["5 elephants", "0", "-1GB"])
def test_a_size_that_is_none_is_refused(folder, tmp_path, size):
    message = refused(folder / "base", tmp_path / "out", f"--max-shard-size={size}")
    assert "such as 24GB or 500MiB" in message


def test_mistakes_are_told_plainly(folder, tmp_path):
    assert "nothing is overwritten" in refused(folder / "base", folder / "adapter")
    done = run(tmp_path / "nowhere", tmp_path / "out")
    assert done.stderr.startswith("error: no folder")


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    """A model with a tokenizer that llama.cpp has."""
    folder = tmp_path_factory.mktemp("known")
    save_model(folder, "qwen2", vocab_size=410)
    tiny_tokenizers.tokenizer("qwen", chat_template=CHATML).save_pretrained(folder)
    return folder


@pytest.mark.filterwarnings("ignore:.*(Token|torch_dtype|deprecated).*")
def test_a_gguf_file_that_does_not_verify_is_deleted_with_its_companions(known, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(known)
    model.model.norm.weight.data *= 1e4
    shutil.copytree(known, tmp_path / "sharp")
    model.save_pretrained(tmp_path / "sharp")
    (tmp_path / "new").mkdir()
    message = refused(tmp_path / "sharp", tmp_path / "new" / "a.gguf", "--to", "gguf", code=1)
    assert "a.gguf is deleted" in message
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.filterwarnings("ignore:.*(Token|torch_dtype|deprecated).*")
def test_a_gguf_file_has_a_modelfile_beside_it(known, tmp_path):
    shown = ok(known, tmp_path / "out.gguf", "--to", "gguf", "--quantize", "q8_0")
    assert shown.splitlines()[0] == f"wrote {tmp_path / 'out.gguf'}"
    assert {path.name for path in tmp_path.iterdir()} == {
        "out.gguf",
        "out.Modelfile",
        "out.receipt.json",
    }
    assert "FROM ./out.gguf\n" in (tmp_path / "out.Modelfile").read_text()
    done = run(known, tmp_path / "out.gguf", "--to", "gguf")
    assert "nothing is overwritten" in done.stderr


def test_options_of_another_target_are_refused(known, tmp_path):
    said = "--dtype cannot be used with --to gguf, which accepts --base, --quantize"
    assert said in refused(known, tmp_path / "a.gguf", "--to", "gguf", "--dtype", "float16")
    message = refused(known, tmp_path / "a", "--quantize", "q8_0")
    assert "--quantize cannot be used with --to huggingface" in message
    message = refused(known, tmp_path / "a", "--to", "compressed-tensors", "--quantize", "q8_0")
    said = "--quantize q8_0 is not written by --to compressed-tensors; expected one of fp8, w8a8"
    assert said in message
    assert not list(tmp_path.iterdir())


def test_a_target_of_conversions_is_written_from_a_run_or_model_as_well(folder, tmp_path):
    shown = ok(folder / "adapter", tmp_path / "out", "--to", "peft", "--dtype", "bfloat16")
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()
    assert "verified" not in shown


def test_a_missing_package_is_named_with_its_cure(known, tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("surefoot.plugins.gguf.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert "pip install -e '.[gguf]'" in refused(known, tmp_path / "a.gguf", "--to", "gguf")
