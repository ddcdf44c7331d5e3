"""Stages one after the other give what the whole model gives, to the bit."""

import copy
import gc
import weakref

import pytest
import torch

import small
import tiny
from each import some
from surefoot.batch import OutputSpec
from surefoot.data.text.collation import collate
from surefoot.errors import RecipeError
from surefoot.model import isolation, outputs
from surefoot.model.pipeline_stages import keep, parameters_of, split


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize(
    "kind", some([*tiny.KINDS, *tiny.MORE], ["llama", "qwen2", "gemma2", "mixtral", "olmo2"])
)
@torch.no_grad()
def test_stages_compose_to_the_model(kind, packing):
    whole, batch = tiny.model(kind), collate(small.examples(5), packing=packing)
    if packing:
        isolation.use_packed(whole)
    expected = outputs.compute(whole, batch, OutputSpec(("entropies",)))
    hidden = None
    for number in range(3):
        model = copy.deepcopy(whole)
        stages = keep(model, [number], 3)
        with stages.only(number):
            if number < 2:
                hidden = outputs.hidden_states(model, batch, hidden)
            else:
                found = outputs.compute(model, batch, OutputSpec(("entropies",)), hidden=hidden)
    assert torch.equal(found.logps, expected.logps)
    assert torch.equal(found.entropies, expected.entropies)


@torch.no_grad()
def test_two_stages_of_one_process_run_one_at_a_time():
    whole, batch = tiny.model(num_hidden_layers=5), collate(small.examples(5), packing=False)
    expected = outputs.compute(whole, batch, OutputSpec(()))
    models = [copy.deepcopy(whole) for _ in range(2)]
    stages = [keep(model, [place, place + 2], 4) for place, model in enumerate(models)]
    hidden = None
    for number in range(3):
        with stages[number % 2].only(number):
            hidden = outputs.hidden_states(models[number % 2], batch, hidden)
    with stages[1].only(3):
        found = outputs.compute(models[1], batch, OutputSpec(()), hidden=hidden)
    assert torch.equal(found.logps, expected.logps)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_each_parameter_is_in_one_stage_but_a_tied_one_under_its_own_name(kind):
    whole = tiny.model(kind)
    names = {p: name for name, p in whole.named_parameters()}
    of_stages = [{names[p] for p in stage} for stage in parameters_of(whole, 3)]
    kept = []
    for number in range(3):
        model = copy.deepcopy(whole)
        keep(model, [number], 3)
        kept.append({name for name, _ in model.named_parameters()})
        assert kept[-1] <= {*names.values(), "lm_head.weight"}
    both = of_stages[0] & of_stages[2]
    assert both == ({"model.embed_tokens.weight"} if kind == "qwen2" else set())
    assert sum(map(len, kept)) == len(names) + len(both)


def test_nothing_keeps_what_other_stages_have():
    model = tiny.model()
    gone = [*model.model.layers[1:], model.model.norm, model.lm_head]
    gone = [weakref.ref(parameter) for module in gone for parameter in module.parameters()]
    stages = keep(model, [0], 3)
    gc.collect()
    assert stages.last == 2
    assert not any(reference() is not None for reference in gone)


@pytest.mark.parametrize(
    ("layers", "stages", "sizes"),
    [(4, 2, [2, 2]), (5, 2, [3, 2]), (5, 4, [1, 2, 1, 1]), (7, 4, [2, 2, 2, 1]), (3, 3, [1] * 3)],
)
def test_what_does_not_divide_goes_to_the_middle_and_never_first_to_the_last(layers, stages, sizes):
    found = split(layers, stages)
    assert [len(run) for run in found] == sizes
    assert [i for run in found for i in run] == list(range(layers))


def test_more_stages_than_layers_are_refused():
    with pytest.raises(
        RecipeError, match="5 pipeline stages need as many layers, but the model has 3"
    ):
        split(3, 5)
