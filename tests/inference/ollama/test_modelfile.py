"""Ollama's template writes what the Jinja template writes, or is left out aloud."""

import json

import pytest

import tiny_tokenizers
from folders import CHATML, save_recipe
from surefoot.data.text.templates import bundled
from surefoot.data.text.templates.render import Renderer
from surefoot.errors import TemplateError
from surefoot.inference.ollama.derived_template import go_template
from surefoot.inference.ollama.go_template import quoted, render
from surefoot.inference.ollama.modelfile import ModelForOllama, modelfile_text
from surefoot.recipe.recipe import load

CONVERSATIONS = [
    ["user"],
    ["system", "user"],
    ["user", "assistant", "user"],
    ["system", "user", "assistant", "user", "assistant", "user"],
]
TEXT = "Say “{{ x }}” twice,\n\n{% if %} <b> 你好 {}."


def conversation(roles):
    return [{"role": role, "content": f"{number} {TEXT}"} for number, role in enumerate(roles)]


def as_ollama(source, messages):
    """What Ollama hands to a template: all messages, and the system messages once more."""
    system = "\n\n".join(m["content"] for m in messages if m["role"] == "system")
    turns = [{"Role": m["role"], "Content": m["content"]} for m in messages]
    return render(source, {"System": system, "Messages": turns})


@pytest.mark.parametrize("name", bundled())
@pytest.mark.parametrize("is_added", [True, False])
def test_every_bundled_template_is_written_for_ollama(name, is_added):
    known = tiny_tokenizers.tokenizer("llama3")
    renderer = Renderer(bundled()[name].source, known)
    if is_added and not renderer.render(conversation(["user"])).startswith("<s>"):
        return  # no first token is added before such a template
    found = go_template(renderer, "<s>", is_added=is_added)
    assert not found.differences
    for roles in CONVERSATIONS:
        expected = renderer.render(conversation(roles), prompt=True)
        expected = expected.removeprefix("<s>") if is_added else expected
        assert as_ollama(found.source, conversation(roles)) == expected


QWEN = (
    "{%- if messages[0].role != 'system' %}"
    "{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}" + CHATML
)
STRIPPING = CHATML.replace("message.content", "message.content | trim")


def test_a_system_message_of_the_template_stands_where_there_is_none():
    renderer = Renderer(QWEN, tiny_tokenizers.tokenizer())
    found = go_template(renderer, "", is_added=False)
    for roles in CONVERSATIONS:
        expected = renderer.render(conversation(roles), prompt=True)
        assert as_ollama(found.source, conversation(roles)) == expected


def test_white_space_that_the_template_strips_is_said():
    renderer = Renderer(STRIPPING, tiny_tokenizers.tokenizer())
    found = go_template(renderer, "", is_added=False)
    assert ["white space" in difference for difference in found.differences] == [True]


@pytest.mark.parametrize(
    ("source", "said"),
    {
        "{{ strftime_now('%d') }}" + CHATML: "date",
        CHATML.replace("message.content", "message.content | upper"): "as it is",
        "{{ messages | length }}" + CHATML: "does not",
        CHATML.replace("add_generation_prompt", "messages | length > 3"): "around it|does not",
    }.items(),
)
def test_a_template_that_cannot_be_expressed_is_left_out(source, said, caplog):
    known = tiny_tokenizers.tokenizer(chat_template=source)
    with pytest.raises(TemplateError, match=said):
        go_template(Renderer(source, known), "", is_added=False)
    text = modelfile_text(ModelForOllama(known, False, [], 100), ["FROM ./a.gguf"], "here").decode()
    assert 'TEMPLATE "' not in text
    assert "cannot be written in Ollama's language" in caplog.text


def test_a_modelfile_has_stops_and_sampling():
    known = tiny_tokenizers.tokenizer(chat_template=CHATML)
    stops = known.convert_tokens_to_ids(["<|im_end|>", "</s>"])
    model = ModelForOllama(
        known, False, stops, 2048, None, {"temperature": 0.6, "top_k": 20, "min_p": 0.05}
    )
    lines = modelfile_text(model, ["FROM ./Some.gguf"], "here").decode().splitlines()
    assert lines[:2] == ["# ollama create some -f THIS_FILE", "FROM ./Some.gguf"]
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
        model = ModelForOllama(known, False, [], 9000, load(path))
        lines = modelfile_text(model, ["FROM ./a.gguf"], "here").decode().splitlines()
        assert 'SYSTEM """Be kind."""' in lines
        assert f"PARAMETER {expected}" in lines
        assert "PARAMETER repeat_penalty 1.0" in lines
        assert lines[-1] == "# PARAMETER num_ctx 9000"
        is_cut = 'PARAMETER stop """\n\n"""\nPARAMETER stop """a"b"""\n' in "\n".join(lines)
        assert is_cut == bool(generate)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a {{- .System -}} b", "aSb"),
        ("{{ if and .System (not .Empty) }}x{{ else }}y{{ end }}", "x"),
        ('{{ if eq .System "T" }}x{{ else if ne .System "T" }}y{{ end }}', "y"),
        ("{{ range $i, $m := .Messages }}{{ $i }}{{ $m.Role }}{{ end }}", None),
        ('{{ $x := "1" }}{{ range .Messages }}{{ $x }}{{ $x = "2" }}{{ .Role }}{{ end }}', "1u2a"),
        ("{{ len (slice .Messages 1) }}", "1"),
        ("{{ .Nothing }}", None),
        ("{{ printf .System }}", None),
        ("{{ if .System }}", None),
        (quoted("{{ .System }}"), "{{ .System }}"),
    ],
)
def test_the_subset_of_go_templates(source, expected):
    data = {"System": "S", "Empty": "", "Messages": [{"Role": "u"}, {"Role": "a"}]}
    if expected is None:
        with pytest.raises(TemplateError):
            render(source, data)
    else:
        assert render(source, data) == expected
