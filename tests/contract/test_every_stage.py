"""What every stage, method and optimizer owes the run, whichever it is."""

import dataclasses
import itertools

import pytest
import torch

import surefoot
import tiny
from adapted import SMALL, method_of
from each import some
from project import Project, assert_same, checkpoints, final_weights, losses, tokenizer
from stage_data import DATASETS, SETTINGS, stage_of, written
from surefoot.batch import Outputs, ends
from surefoot.data.example import EMPTY, Dropped, Example, Message, Truncated
from surefoot.data.order.micro_batches import Collation
from surefoot.data.section import DataSection
from surefoot.data.text.codec import Codec
from surefoot.data.text.templates import load_template
from surefoot.errors import DataError
from surefoot.methods import METHODS
from surefoot.optim import OPTIMIZERS
from surefoot.optim.blocks import ParameterNames
from surefoot.schema import settings
from surefoot.stages import STAGES
from surefoot.training import TrainerCallback
from surefoot.training.context import blank_examples

SWITCHING = {name for name, made in METHODS.items() if "switch_interval" in settings(made)}

VARIANTS = {**STAGES, **METHODS, **OPTIMIZERS}
EXAMPLES = [
    Example(messages=(Message("user", "What is 1 plus 1?"), Message("assistant", "It is 2."))),
    Example(messages=(Message("user", "And then?"),), text="Once upon a time."),
    Example(messages=(Message("user", ""), Message("assistant", ""))),
    Example(
        messages=(Message("user", "What is 1 plus 1?"), Message("assistant", "2.")), label=True
    ),
    Example(messages=(Message("user", "And 2 plus 2?"), Message("assistant", "5.")), label=False),
    Example(
        messages=(Message("user", "What is 1 plus 1?"),),
        chosen=Message("assistant", "It is 2."),
        rejected=Message("assistant", "It is 3, or more."),
    ),
    Example(text="It is small.", columns={"label": "small"}),
]


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_is_a_frozen_dataclass_whose_fields_are_documented(name):
    variant = VARIANTS[name]
    assert dataclasses.is_dataclass(variant)
    assert variant.__dataclass_params__.frozen
    assert variant.__doc__
    assert all(setting.doc for setting in settings(variant).values())
    # A field without a default would take the property of its name in the base for one.
    assert not any(isinstance(setting.default, property) for setting in settings(variant).values())


def codec():
    made = tokenizer()
    return Codec(made, load_template("auto", made), DataSection(datasets=("any",), cutoff_len=64))


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_gives_one_outcome_per_example_and_batches_of_what_it_kept(name):
    stage = stage_of(name)
    outcomes = stage.encode(EXAMPLES, codec())
    assert len(outcomes) == len(EXAMPLES)
    assert all(o.reason for o in outcomes if isinstance(o, Dropped))
    kept = [
        o.features if isinstance(o, Truncated) else o
        for o in outcomes
        if not isinstance(o, Dropped)
    ]
    items = [item for features in kept for item in features]
    assert items
    items = blank_examples(stage, codec(), items, Collation(stage.collate))
    packed, padded = (stage.collate(items, packing=packing) for packing in (True, False))
    assert packed.num_trained == padded.num_trained > 0
    assert packed.num_tokens <= padded.num_tokens  # a shared prompt is there once


ASKED = Message("user", "What is 1 plus 1?")
IMITATE = ["sft", "pt", "distill"]  # stages that train on whatever response a row has


@pytest.mark.parametrize("name", IMITATE)
def test_what_is_marked_bad_is_not_imitated(name):
    answer = Message("assistant", "5.")
    rows = [
        Example((ASKED, answer), label=False),
        Example((ASKED,), chosen=answer, rejected=answer),
    ]
    assert [type(o) for o in stage_of(name).encode(rows, codec())] == [Dropped, Dropped]


@pytest.mark.parametrize("name", IMITATE)
def test_a_mark_that_nothing_reads_stops_it_and_says_how_to_read_it(name):
    row = Example((ASKED, Message("assistant", "5.")), unread_mark="good", origin="d:7")
    with pytest.raises(DataError, match=r'd:7: the column \'good\' .* \{"kto_tag": "good"\}'):
        stage_of(name).encode([row], codec())


@pytest.mark.parametrize("name", ["sft", "dpo", "rm", "kto"])
@pytest.mark.parametrize("blank", ["", " \n"])
def test_an_empty_response_is_dropped_unless_it_is_marked_to_be_trained_on(name, blank):
    empty, good = Message("assistant", blank), Message("assistant", "2.")
    wanted = dataclasses.replace(empty, learn=True)
    ranked = [Example((ASKED,), chosen=good, rejected=one) for one in (empty, wanted)]
    plain = [Example((ASKED, one), label=True) for one in (empty, wanted)]
    dropped, kept = stage_of(name).encode(ranked if name in ("dpo", "rm") else plain, codec())
    assert dropped == EMPTY
    assert not isinstance(kept, Dropped)


def test_an_empty_response_that_is_masked_is_no_reason():
    chat = (ASKED, Message("assistant", "", learn=False), ASKED, Message("assistant", "2."))
    call = Message("assistant", "", tool_calls=({"name": "f", "arguments": {}},))
    found = stage_of("sft").encode([Example(chat), Example((ASKED, call))], codec())
    assert found[0] != EMPTY
    assert found[1] != EMPTY


def test_plain_text_under_sft_names_the_stage_for_it():
    (found,) = stage_of("sft").encode(EXAMPLES[1:2], codec())
    assert "stage: pt" in found.reason


def test_calls_are_not_left_out_of_a_text():
    call = Message("assistant", "", tool_calls=({"name": "f", "arguments": {}},))
    (found,) = stage_of("pt").encode([Example((ASKED, call))], codec())
    assert "stage: sft" in found.reason


@pytest.mark.parametrize("name", STAGES)
def test_a_loss_is_a_sum_with_its_weight_so_batches_add_up(name):
    stage = stage_of(name)
    outcomes = [o for o in stage.encode(EXAMPLES, codec()) if not isinstance(o, Dropped)]
    items = [item for features in outcomes for item in features]
    items = list(blank_examples(stage, codec(), items, Collation(stage.collate)))
    items = (items * 2)[:2]
    halves = [stage.collate([item], packing=True) for item in items]
    whole = stage.collate(items, packing=True)
    logps = [torch.randn(batch.num_trained, dtype=torch.float64) for batch in halves]
    sizes = [len(ends(b).labels) if stage.spec.gives_scores else b.num_trained for b in halves]
    width = [n for n in stage.heads.values() if n > 1]  # of a head of several numbers
    values = [torch.randn(size, *width, dtype=torch.float64) for size in sizes]
    parts = [
        stage.loss("policy", Outputs(x, x.sum(), values=v, divergences=x.exp()), batch)
        for x, v, batch in zip(logps, values, halves, strict=True)
    ]
    joined = torch.cat(logps)
    said = Outputs(joined, joined.sum(), values=torch.cat(values), divergences=joined.exp())
    together = stage.loss("policy", said, whole)
    torch.testing.assert_close(together.total, sum(part.total for part in parts))
    assert together.weight == sum(part.weight for part in parts)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_lets_something_learn_and_the_model_still_speaks(name):
    method, inner = method_of(name), tiny.model()
    model = method.apply(inner)
    learning = [p for p in model.parameters() if p.requires_grad]
    assert learning
    model(input_ids=torch.tensor([[5, 6, 7]])).logits.sum().backward()
    assert all(p.grad is not None for p in learning)
    weights = method.weights(model, inner)
    assert weights.kind == ("full" if method.saves_base_model else "adapter")
    names = ParameterNames(("embed",), (("a", "b"), ("c",)), ("norm", "head"), ("value",))
    blocks = method.trainable(names, 0)
    assert blocks == method.trainable(names, 0) or blocks.switch
    turns = [blocks.trainable(step) for step in range(200)]
    assert turns == [method.trainable(names, 0).trainable(step) for step in range(200)]
    assert all(found <= {*names.all} and "value" in found for found in turns)
    assert frozenset().union(*turns) == blocks.always | blocks.in_turn


# Each stage and each method once; the other pairs are proofs. `methods/test_changing_parameters.py`
# has lisa.
FEW = [
    ("pt", "full"),
    ("sft", "badam_ratio"),
    ("dpo", "vera"),
    ("kto", "oft"),
    ("rm", "freeze"),
    ("classify", "full"),
]
FEW += [("ppo", "llama_pro"), ("grpo", "lora"), ("distill", "badam")]
assert {*map(str, STAGES), *METHODS} == {name for pair in FEW for name in pair} | {"lisa"}


@pytest.mark.parametrize(("stage", "method"), some([*itertools.product(STAGES, METHODS)], FEW))
def test_every_stage_and_method_resumes_to_the_same_bits(stage, method, tmp_path):
    """From step 3: in mid-epoch, in a window of rollouts and in a block of what trains in turn,
    each of which ends with step 4."""
    data = {"datasets": [DATASETS.get(stage, "sums")], "cache_dir": str(tmp_path / "cache")}
    settings = written(stage) if stage in SETTINGS else stage
    changes = {"switch_interval": 2} if method in SWITCHING else SMALL.get(method)
    method = {method: changes} if changes else method
    data["max_samples"] = 16
    project = Project(tmp_path, stage=settings, method=method, data=data, train={"max_steps": 5})
    surefoot.train(project.recipe)
    cut = tmp_path / "cut"
    surefoot.train(project.recipe, callbacks=[Stop(4)], **{"train.output_dir": str(cut)})
    assert [folder.name for folder in checkpoints(cut)] == ["checkpoint-3"]  # the fourth is lost
    surefoot.train(project.recipe, **{"train.output_dir": str(cut)})
    assert losses(cut) == losses(project.run)
    assert_same(final_weights(cut), final_weights(project.run))


class Stop(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control):
        control.should_training_stop |= state.global_step == self.step


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_lowers_a_loss_and_follows_its_schedule(name):
    made = OPTIMIZERS[name](learning_rate=0.1)
    weight = torch.nn.Parameter(torch.full((3, 3), 2.0))
    optimizer = made.build([("weight", weight)])
    for _ in range(10):
        optimizer.zero_grad()
        loss = (weight**2).sum()
        loss.backward()
        optimizer.step()
    assert (weight**2).sum() < 36
    assert optimizer.param_groups[0]["names"] == ["weight"]
    assert made.schedule_over(10).factor(0) > 0
