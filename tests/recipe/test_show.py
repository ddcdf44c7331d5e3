import pytest

from surefoot.recipe.recipe import lines, load, read

DATA = {
    "model": {"path": "m"},
    "data": {"datasets": ["a", "b"], "default_system": "one\ntwo # three"},
    "stage": "sft",
    "train": {"output_dir": "runs/x", "max_steps": 3},
}


def shown(recipe, **options):
    return [text for text, _ in lines(recipe, **options)]


def test_defaults_are_marked_and_the_rest_is_not():
    texts = shown(read(DATA))
    assert "  max_steps: 3" in texts
    assert "  num_epochs: 3.0  # default" in texts
    at = texts.index("method:")
    assert texts[at + 1 : at + 3] == ["  full:", "    frozen_modules: []  # default"]
    at = texts.index("stage:")
    assert texts[at + 1 : at + 3] == ["  sft:", "    loss_type: cross_entropy  # default"]
    assert "  datasets: [a, b]" in texts


def test_a_section_of_defaults_is_dimmed_as_a_whole():
    is_default = dict(lines(read(DATA)))
    assert is_default["checkpoint:"]
    assert is_default["  adamw:"]
    assert not is_default["train:"]


def test_a_variant_with_settings_stands_above_them():
    texts = shown(read({**DATA, "method": {"lora": {"rank": 4}}}))
    at = texts.index("method:")
    assert texts[at + 1 : at + 4] == ["  lora:", "    rank: 4", "    alpha: null  # default"]


def test_docs_stand_above_each_setting():
    texts = shown(read(DATA), docs=True)
    at = texts.index("  max_steps: 3")
    assert texts[at - 1] == "  # Optimizer steps to train for."
    assert all(len(text) <= 100 for text in texts)


@pytest.mark.parametrize("docs", [False, True])
def test_what_is_shown_is_the_recipe(tmp_path, docs):
    recipe = read({**DATA, "method": "lora"}, base=tmp_path)
    path = tmp_path / "shown.yaml"
    path.write_text("\n".join(shown(recipe, docs=docs)))
    assert load(path) == recipe
