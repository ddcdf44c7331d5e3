"""The figures are those of training, and answers are compared with what the data says."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import surefoot
from folders import CHATML, save_model, save_recipe
from surefoot.data.example import Example, Message
from surefoot.errors import DataError
from surefoot.recipe.recipe import load
from surefoot.run.parts import RunParts
from surefoot.use import Generation, evaluation, open_model
from surefoot.use.evaluation import held_out, measure
from surefoot.use.model_loading import open_start
from surefoot.use.run_evaluation import adopt, generations


def example(*texts, **fields):
    roles = ("user", "assistant") * len(texts)
    turns = tuple(Message(role, text) for role, text in zip(roles, texts, strict=False))
    return Example(turns, origin="made:0", **fields)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run and its recipe."""
    folder = tmp_path_factory.mktemp("trained")
    path = save_recipe(folder, data={"val_size": 7})
    return surefoot.train(path), load(path), folder


def test_the_figures_of_a_checkpoint_are_those_training_logged(trained):
    state, recipe, folder = trained
    logged = {r["step"]: r for r in state.log_history if "eval_loss" in r}
    for step in (2, 4):
        opened, parts = adopt(open_model(folder / "run" / f"checkpoint-{step}"), recipe)
        (source,) = held_out(parts)
        found = measure(opened, parts, source.examples)
        for name, value in found.items():
            assert value == pytest.approx(logged[step][f"eval_{name}"], rel=1e-5), name


def test_the_start_is_measured_as_the_untouched_model(trained):
    _, recipe, folder = trained
    start = RunParts.to_measure(recipe)
    (source,) = held_out(start)
    each = [adopt(opened, recipe) for opened in (open_start(start), open_model(folder / "model"))]
    first, second = (measure(opened, parts, source.examples) for opened, parts in each)
    assert first == second


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("project")
    return folder, load(save_recipe(folder))


@pytest.fixture(scope="module")
def opened(project):
    folder, recipe = project
    return adopt(open_model(folder / "model"), recipe)[0]


def around(opened, recipe):
    return opened, RunParts.around(recipe, opened.codec, Path(opened.inner.name_or_path))


def test_the_loss_is_that_of_a_plain_loop(project, opened):
    """Against one forward per example, no packing, float64 sums."""
    _, recipe = project
    examples = [example("1+1?", "2"), example("Hé", "Ça va?", "Oui", "Bien")]
    total, count = 0.0, 0
    for each in examples:
        chat = [{"role": m.role, "content": m.content} for m in each.messages]
        made = opened.tokenizer.apply_chat_template(
            chat, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, mask = torch.tensor(made["input_ids"]), torch.tensor(made["assistant_masks"]).bool()
        with torch.no_grad():
            logps = opened.model(ids[None]).logits[0].double().log_softmax(-1)
        picked = logps[:-1].gather(1, ids[1:, None])[:, 0][mask[1:]]
        total, count = total - float(picked.sum()), count + len(picked)
    assert measure(*around(opened, recipe), examples)["loss"] == pytest.approx(
        total / count, rel=1e-5
    )


def test_batches_are_counted(project, opened):
    _, recipe = project
    examples, done = [example("1+1?", "2")] * 5, []
    measure(*around(opened, recipe), examples, on_batch=lambda: done.append(1))
    assert len(done) == evaluation.num_batches(recipe, 5) == 3


def test_prompts_and_references_are_split_where_training_splits(project, opened):
    _, recipe = project
    chat = example("1+1?", "2", "sure?", " yes\n")
    (found,) = generations(*around(opened, recipe), [chat])
    before = [{"role": m.role, "content": m.content} for m in chat.messages[:-1]]
    render = opened.tokenizer.apply_chat_template
    assert found.prompt == render(before, add_generation_prompt=True, tokenize=False)
    assert found.reference == " yes\n"
    assert found.origin == "made:0"


def test_answers_are_the_models_own(project, opened):
    _, recipe = project
    (found,) = generations(*around(opened, recipe), [example("1+1?", "2")])
    ids = opened.prompt([Message("user", "1+1?")])
    greedy = opened.model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        max_new_tokens=recipe.generate.max_new_tokens,
        do_sample=False,
    )
    assert found.answer == opened.tokenizer.decode(greedy[0, len(ids) :])
    assert not found.is_match


def test_responses_are_computed_in_the_same_shapes_whatever_is_beside_them(project, opened):
    _, recipe = project
    counts = []
    handle = opened.model.register_forward_pre_hook(
        lambda _, __, given: counts.append(given["input_ids"].shape), with_kwargs=True
    )
    generations(*around(opened, recipe), [example("1+1?", "2")])
    handle.remove()
    assert {rows for rows, length in counts[-recipe.generate.max_new_tokens :]} == {4}


def test_a_match_is_the_same_text_white_space_around_it_aside():
    assert Generation("", "", " yes\n", "yes").is_match
    assert not Generation("", "", "yes", "Yes").is_match
    assert not Generation("", "", "yes", "yes yes").is_match


def test_only_conversations_that_end_in_an_answer_are_asked(project, opened):
    _, recipe = project
    asked = Example((Message("user", "Hi"),), origin="a:0")
    untaught = Example((Message("user", "Hi"), Message("assistant", "Ho", learn=False)))
    found = generations(*around(opened, recipe), [asked, example("1+1?", "2"), untaught])
    assert [g.origin for g in found] == ["made:0"]


def test_stop_texts_cut_responses_before_them(project, opened):
    _, recipe = project
    asked = [example(f"{n}+1?", "2") for n in range(3)]
    free = [one.answer for one in generations(*around(opened, recipe), asked)]
    stop = free[0][1:3]
    recipe = replace(recipe, generate=replace(recipe.generate, stop=(stop,)))
    cut = [one.answer for one in generations(*around(opened, recipe), asked)]
    assert cut == [text.partition(stop)[0] for text in free]
    hidden = [one.answer for one in generations(*around(opened, recipe), asked, hides_special=True)]
    for text, shown in zip(hidden, cut, strict=True):
        assert text == re.sub(r"<\|[a-z_]+\|>", "", shown)


def test_an_undesirable_response_is_not_expected(project, opened):
    _, recipe = project
    chats = [
        replace(example("1+1?", "2"), label=label, origin=str(label)) for label in (True, False)
    ]
    assert [found.origin for found in generations(*around(opened, recipe), chats)] == ["True"]
    assert generations(*around(opened, recipe), chats[1:]) == []


def test_masking_and_cutting_for_training_do_not_touch_the_questions(project, opened):
    folder, recipe = project
    chat = example("1+1?", "2", "sure?", "yes " * 8)
    expected = generations(*around(opened, recipe), [chat])
    for override in ("data.train_on_prompt=true", "data.cutoff_len=30", "data.mask_history=true"):
        other = load(folder / "recipe.yaml", [override])
        assert generations(*adopt(opened, other), [chat]) == expected


def test_generating_works_after_measuring_with_packed_rows(project, opened):
    _, recipe = project
    before = generations(*around(opened, recipe), [example("1+1?", "2")])
    measure(*around(opened, recipe), [example("1+1?", "2")] * 2)
    assert generations(*around(opened, recipe), [example("1+1?", "2")]) == before


def test_a_prompt_that_fills_the_window_has_no_answer(project, tmp_path):
    _, recipe = project
    small, parts = adopt(open_model(save_model(tmp_path / "m", max_position_embeddings=32)), recipe)
    found = generations(small, parts, [example("x" * 40, "2"), example("1?", "2")])
    assert (found[0].answer, bool(found[1].answer)) == ("", True)


def test_nothing_to_measure_is_an_error(project, opened):
    _, recipe = project
    with pytest.raises(DataError, match="no example of 1 can be evaluated"):
        measure(*around(opened, recipe), [Example((Message("user", "Hi"),))])
    with pytest.raises(DataError, match="there are none"):
        measure(*around(opened, recipe), [])


def test_a_model_without_a_template_takes_the_recipes(project, tmp_path):
    folder, _ = project
    plain = open_model(save_model(tmp_path / "m", template=None))
    recipe = load(folder / "recipe.yaml", ["data.template=default"])
    assert adopt(plain, recipe)[0].template.name == "default"
    own = open_model(folder / "model")
    assert adopt(own, recipe)[0].template.source == CHATML


def test_plain_texts_are_measured_and_not_asked(project, tmp_path):
    folder, _ = project
    opened = open_model(folder / "model")
    recipe = load(folder / "recipe.yaml", ["stage=pt"])
    texts = [Example(text="Once upon a time.", origin="t:0")]
    ids = torch.tensor([opened.tokenizer(texts[0].text + "<|endoftext|>")["input_ids"]])
    with torch.no_grad():
        expected = float(opened.model(ids, labels=ids).loss)
    assert measure(*adopt(opened, recipe), texts)["loss"] == pytest.approx(expected)
