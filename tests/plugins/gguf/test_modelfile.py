"""What a Modelfile says besides the files."""

import json

import pytest

import tiny_tokenizers
from folders import CHATML, save_recipe
from surefoot.plugins.gguf.export import ModelForOllama, modelfile_text
from surefoot.recipe.recipe import load


def test_a_modelfile_has_stops_and_sampling():
    known = tiny_tokenizers.tokenizer(chat_template=CHATML)
    stops = known.convert_tokens_to_ids(["<|im_end|>", "</s>"])
    model = ModelForOllama(
        known, stops, 2048, None, {"temperature": 0.6, "top_k": 20, "min_p": 0.05}
    )
    lines = modelfile_text(model, ["FROM ./Some.gguf"]).decode().splitlines()
    assert lines[0] == "# ollama create some -f THIS_FILE"
    assert lines[1].endswith("ollama show --template some")
    assert lines[2] == "FROM ./Some.gguf"
    assert not any(line.startswith("TEMPLATE") for line in lines)
    assert 'PARAMETER stop "<|im_end|>"' in lines
    assert 'PARAMETER stop "</s>"' in lines
    assert "PARAMETER temperature 0.6" in lines
    assert "PARAMETER min_p 0.05" in lines
    assert "PARAMETER num_ctx 2048" in lines
    assert json.loads(lines[-5].removeprefix("PARAMETER stop "))


def test_a_modelfile_samples_as_the_recipe_and_has_its_system_message(tmp_path):
    known = tiny_tokenizers.tokenizer(chat_template=CHATML)
    sampling = {"do_sample": True, "temperature": 0.5, "top_p": 0.9, "stop": ["\n\n", 'a"b']}
    for generate, expected in [(sampling, "temperature 0.5"), ({}, "temperature 0")]:
        path = save_recipe(tmp_path, data={"default_system": "Be kind."}, generate=generate)
        model = ModelForOllama(known, [], 9000, load(path))
        lines = modelfile_text(model, ["FROM ./a.gguf"]).decode().splitlines()
        assert 'SYSTEM """Be kind."""' in lines
        assert f"PARAMETER {expected}" in lines
        assert "PARAMETER repeat_penalty 1.0" in lines
        assert lines[-1] == "# PARAMETER num_ctx 9000"
        is_cut = 'PARAMETER stop """\n\n"""\nPARAMETER stop """a"b"""\n' in "\n".join(lines)
        assert is_cut == bool(generate)


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ('Say """yes""" often.', True),
        ('Two lines\nand """three""" quotes"""', True),
        ('It ends with """\nin the first line', False),
        ('It ends with """  \r', False),
    ],
)
def test_three_quotes_end_a_system_text_at_the_end_of_a_line_only(text, fits, tmp_path, caplog):
    """By Ollama's parser: it looks for the end of a value where a line ends."""
    recipe = load(save_recipe(tmp_path, data={"default_system": text}))
    model = ModelForOllama(tiny_tokenizers.tokenizer(chat_template=CHATML), [], 64, recipe)
    written = modelfile_text(model, ["FROM ./a.gguf"]).decode()
    assert (f'SYSTEM """{text}"""\n' in written) == fits
    assert ("cannot contain it as SYSTEM" in caplog.text) == (not fits)
