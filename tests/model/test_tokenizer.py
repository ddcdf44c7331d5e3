"""Loading a tokenizer: what is missing is completed or refused, with the file at fault."""

import errno
import json
import os
import resource

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

import tiny_tokenizers
from surefoot.errors import ModelError
from surefoot.model.tokenizer import load_tokenizer
from surefoot.model.weights import saved_files


@pytest.fixture
def folder(tmp_path):
    """A saved tokenizer without a padding token."""
    tiny_tokenizers.tokenizer("llama3").save_pretrained(tmp_path)
    return tmp_path


def test_it_pads_with_the_end_of_sequence_token_if_it_has_nothing_else(folder):
    tokenizer = load_tokenizer(folder)
    assert tokenizer.is_fast
    assert tokenizer.pad_token == "</s>"
    tiny_tokenizers.tokenizer(pad_token="<unk>").save_pretrained(folder)
    assert load_tokenizer(folder).pad_token == "<unk>"


def test_new_special_tokens_are_one_token_each_and_survive_saving(folder, tmp_path):
    before = len(load_tokenizer(folder))
    tokenizer = load_tokenizer(folder, new_special_tokens=("<a>", "<|im_end|>", "<b>", "<a>"))
    assert len(tokenizer) == before + 2
    assert tokenizer.encode("<a>x<b>", add_special_tokens=False)[::2] == [before, before + 1]
    tokenizer.save_pretrained(tmp_path / "saved")
    again = load_tokenizer(tmp_path / "saved")
    assert again.encode("<a>x<b> <|im_end|>") == tokenizer.encode("<a>x<b> <|im_end|>")
    assert again.decode(again.encode("<a>x"), skip_special_tokens=True) == "x"


def test_a_word_of_the_vocabulary_can_become_special_without_a_new_embedding(folder):
    before = load_tokenizer(folder)
    word = next(token for token in before.get_vocab() if token.isalpha() and len(token) > 3)
    after = load_tokenizer(folder, new_special_tokens=(word,))
    assert len(after) == len(before)
    assert after.encode(f"a{word}b", add_special_tokens=False)[1] == before.get_vocab()[word]


def test_a_folder_without_a_tokenizer_is_said(tmp_path):
    with pytest.raises(ModelError, match=r"no tokenizer found; expected tokenizer\.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(ModelError, match="no such folder"):
        load_tokenizer(tmp_path / "missing")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("rest", [b"", b'{"version": "1.0", ', b"\xff\xfe\x00"])
def test_a_damaged_file_is_named(folder, name, rest):
    (folder / name).write_bytes(rest)
    with pytest.raises(ModelError, match=rf"{name} is damaged"):
        load_tokenizer(folder)


def test_a_file_of_something_else_is_an_error(folder):
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"type": "none"}}))
    with pytest.raises(ModelError, match="cannot load its tokenizer"):
        load_tokenizer(folder)


def test_a_tokenizer_that_ends_nothing_is_refused(folder):
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["eos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="has no eos_token"):
        load_tokenizer(folder)


def test_a_slow_tokenizer_is_refused(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    (tmp_path / "vocab.txt").write_text("unused")
    with pytest.raises(ModelError, match=r"no fast \(Rust\) version"):
        load_tokenizer(tmp_path)


def test_a_hub_id_without_network_is_an_error_and_not_a_traceback():
    with pytest.raises(ModelError, match=r"someone/nothing: cannot load its tokenizer"):
        load_tokenizer("someone/nothing")


@pytest.mark.parametrize("limit", [16, 1024])  # in what Python writes, and in what Rust does
def test_a_tokenizer_that_cannot_be_written_is_an_error_of_the_system(folder, limit):
    tokenizer = load_tokenizer(folder)
    if (child := os.fork()) == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        try:
            saved_files(tokenizer)
        except OSError as error:
            os._exit(error.errno)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == errno.EFBIG


def typed(folder, kind, model_type, **config):
    """A folder with a tokenizer of ``kind`` in a model of another type."""
    tiny_tokenizers.tokenizer(kind).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    names = {"eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**names, **config}))


OTHERWISE = "tokenizer_class.: .PreTrainedTokenizerFast"


@pytest.mark.parametrize(
    ("kind", "model_type", "cure"),
    [
        ("gpt2", "qwen3", OTHERWISE),
        ("llama2", "qwen3", OTHERWISE),
        ("qwen", "gpt2", OTHERWISE),
        ("gpt2", "qwen2", "takes Qwen2Tokenizer for all models of the type qwen2"),
    ],
)
def test_a_class_that_tokenizes_differently_from_its_file_is_refused(
    tmp_path, kind, model_type, cure
):
    typed(tmp_path, kind, model_type)
    text = "It's 12345 words.\n\n  你好"
    expected = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    expected = expected.encode(text, add_special_tokens=False).ids
    built = AutoTokenizer.from_pretrained(tmp_path)
    assert built.encode(text, add_special_tokens=False) != expected
    with pytest.raises(ModelError, match=cure):
        load_tokenizer(tmp_path)
    if cure == OTHERWISE:
        typed(tmp_path, kind, model_type, tokenizer_class="PreTrainedTokenizerFast")
        assert load_tokenizer(tmp_path).encode(text, add_special_tokens=False) == expected
        typed(tmp_path, kind, model_type)
    built.save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).encode(text) == built.encode(text)


@pytest.mark.parametrize(
    ("kind", "model_type", "name"),
    [
        ("qwen", "qwen2", "Qwen2Tokenizer"),
        ("llama3", "qwen3", "Qwen2Tokenizer"),
        ("gpt2", "gpt2", "GPT2Tokenizer"),
        ("metaspace", "llama", "LlamaTokenizer"),
        ("llama2", "llama", "LlamaTokenizer"),
    ],
)
def test_a_class_that_tokenizes_as_its_file_is_loaded(tmp_path, kind, model_type, name):
    added = {"additional_special_tokens": ["<new>"], "add_bos_token": True}
    typed(tmp_path, kind, model_type, tokenizer_class=name, **added)
    assert type(load_tokenizer(tmp_path)).__name__ == name
