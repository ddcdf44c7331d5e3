"""Methods that train other parameters at other steps: a run resumes inside and between them."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel

import tiny
from each import some
from project import Project, assert_same, final_weights, losses
from surefoot.errors import CheckpointError, ModelError, RecipeError, RunError
from surefoot.methods import LISA, BAdam, Full
from surefoot.network._parameter_names import names_by_part
from surefoot.plugins.trainers.to_trainer import save_trainer_checkpoint
from surefoot.recipe.recipe import load
from surefoot.run.assembly import build
from surefoot.training import TrainerCallback

STEPS, INTERVAL = 8, 3  # turns: steps 1-3, 4-6, 7-8
BADAM = BAdam(switch_interval=INTERVAL)
LISA_2 = LISA(switch_interval=INTERVAL, num_layers=2)
ENDS = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}


class Watch(TrainerCallback):
    """Notes the layers whose parameters the optimizer has at each step, and stops at a step."""

    def __init__(self, last=STEPS):
        self.last, self.layers, self.moments = last, {}, {}

    def on_optimizer_step(self, args, state, control):
        names = [name for group in args.optimizer.param_groups for name in group["names"]]
        trained = {n for n, p in args.model.named_parameters() if p.requires_grad}
        moved = {n for n, p in args.model.named_parameters() if p.grad is not None}
        assert set(names) == trained == moved
        step = state.global_step + 1
        self.layers[step] = {int(name.split(".")[2]) for name in {*names} - ENDS}
        held = args.learner.trained.state_dict()
        self.moments[step] = {name: int(found["step"]) for name, found in held.items()}

    def on_step_end(self, args, state, control):
        control.should_training_stop |= state.global_step == self.last


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    return Project(tmp_path_factory.mktemp("project"), train={"max_steps": STEPS})


def at(project, folder, method, save_steps):
    recipe = load(project.recipe)
    return replace(
        recipe,
        method=method,
        train=replace(recipe.train, output_dir=folder),
        checkpoint=replace(recipe.checkpoint, save_steps=save_steps, keep=9),
    )


@pytest.fixture(scope="module", params=some([BADAM, LISA_2], [BADAM]), ids=["badam", "lisa"])
def whole(request, project, tmp_path_factory):
    """A method, the folder of a run that saved every step, and what was seen in it."""
    watch, folder = Watch(), tmp_path_factory.mktemp("whole")
    build(at(project, folder, request.param, 1), callbacks=[watch]).fit()
    return request.param, folder, watch


@pytest.mark.parametrize("saved", some([5, 6], [5]))  # inside a turn, and on its edge
def test_a_run_that_trains_some_layers_at_a_time_resumes_to_the_same_bits(
    project, whole, saved, tmp_path
):
    method, folder, watch = whole
    if method is BADAM:
        assert [watch.layers[step] for step in (1, 3, 4, 6, 7, 8)] == [{0}, {0}, {1}, {1}, {2}, {2}]

    moments = load_file(folder / f"checkpoint-{saved}" / "optimizer.safetensors")
    trained = {name.rpartition(".")[0] for name in moments}
    assert {int(name.split(".")[2]) for name in trained - ENDS} == watch.layers[saved]
    assert trained & ENDS == (set() if method is BADAM else ENDS)

    again, rest = Watch(), at(project, tmp_path / "rest", method, saved)
    build(rest, resume=folder / f"checkpoint-{saved}", callbacks=[again]).fit()
    assert again.layers == {step: watch.layers[step] for step in range(saved + 1, STEPS + 1)}
    assert again.moments == {step: watch.moments[step] for step in range(saved + 1, STEPS + 1)}
    assert losses(tmp_path / "rest") == losses(folder)  # the checkpoint contains the earlier log
    assert_same(final_weights(tmp_path / "rest"), final_weights(folder))


def test_the_trainer_cannot_resume_it(project, whole, tmp_path):
    method, folder, _ = whole
    recipe, newest = at(project, folder, method, 100), folder / f"checkpoint-{STEPS}"
    with pytest.raises(CheckpointError, match="blocks of parameters in turn"):
        save_trainer_checkpoint(newest, tmp_path / "out", run=recipe)
    assert not (tmp_path / "out").exists()


def test_what_remains_trainable_keeps_its_state_when_the_layers_change(whole):
    method, _, watch = whole
    if method is BADAM:
        assert [{*watch.moments[step].values()} for step in range(1, 9)] == [
            {count} for count in (1, 2, 3, 1, 2, 3, 1, 2)
        ]
        return
    for step, counts in watch.moments.items():
        assert {counts[name] for name in ENDS} == {step}
    begun = {1: watch.layers[1], 4: watch.layers[4] - watch.layers[3]}
    for step, layers in begun.items():  # a layer that is drawn again goes on, too
        new = {n: c for n, c in watch.moments[step].items() if n not in ENDS}
        assert {int(n.split(".")[2]) for n, count in new.items() if count == 1} == layers


def test_float32_masters_are_those_of_the_active_block(project, tmp_path):
    def run(folder, save_steps, **options):
        recipe = at(project, tmp_path / folder, BADAM, save_steps)
        model = replace(recipe.model, dtype="bfloat16")
        optim = replace(recipe.optim, bf16_weights="master")
        build(replace(recipe, model=model, optim=optim), **options).fit()

    run("whole", 5)
    saved = tmp_path / "whole" / "checkpoint-5"
    masters = {n for n in load_file(saved / "optimizer.safetensors") if n.endswith(".master")}
    assert masters and all(name.startswith("model.layers.1.") for name in masters)
    run("rest", 100, resume=saved)
    assert_same(final_weights(tmp_path / "rest"), final_weights(tmp_path / "whole"))


def test_checkpoints_inside_a_block_share_what_it_does_not_train(whole):
    method, folder, _ = whole
    if method is LISA_2:
        return  # it trains the embeddings at every step, most of these weights
    folders = [folder / f"checkpoint-{step}" for step in (1, 2, 3, 4)]
    weights = [{p.stat().st_ino: p.stat().st_size for p in f.glob("model*")} for f in folders]
    size = sum(weights[0].values())
    new = [
        sum(bytes_ for inode, bytes_ in now.items() if inode not in before) / size
        for before, now in pairwise(weights)
    ]
    assert new[0] < 0.4 and new[1] < 0.4  # one layer of three, and no embeddings
    assert new[2] > 0.9  # at a switch all files change: the frozen file contains other layers


def test_the_log_tells_which_block_is_trained_and_seldom(project, tmp_path, caplog):
    caplog.set_level("INFO", "surefoot")
    build(at(project, tmp_path / "run", BAdam(switch_interval=1), 100)).fit()
    lines = [r.getMessage() for r in caplog.records if r.name.endswith("training.step")]
    assert lines == ["steps 1 to 1 train layer 0"]
    table = next(r.getMessage() for r in caplog.records if "of all weights" in r.getMessage())
    rows = [line.split("%") for line in table.splitlines()[1:]]
    found = {modules.split()[0].strip(",:"): trained.strip() for modules, trained in rows}
    assert found["embed_tokens"] == "no: not chosen"  # and lm_head, in the same row
    assert found["mlp"] == found["self_attn"] == "yes, in turn"


def test_one_layer_at_a_time_learns_as_adamw_on_that_layer_alone(project, tmp_path):
    """Against torch's own AdamW, a new one for each block, on the same batches."""
    seen, kept = [], {}

    class Batches(TrainerCallback):
        def on_optimizer_step(self, args, state, control):
            named = args.model.named_parameters()
            seen.append({n: p.grad.detach().clone() for n, p in named if p.grad is not None})

        def on_train_begin(self, args, state, control):
            kept.update((n, p.detach().clone()) for n, p in args.model.named_parameters())

    recipe = at(project, tmp_path / "run", BADAM, 100)
    optim = replace(recipe.optim, weight_decay=0.3, schedule="constant")
    build(replace(recipe, optim=optim), callbacks=[Batches()]).fit()
    for step, gradients in enumerate(seen):
        if step % INTERVAL == 0:
            chosen = {n: torch.nn.Parameter(kept[n]) for n in gradients}
            adamw = torch.optim.AdamW(
                [
                    {"params": [p for p in chosen.values() if p.ndim > 1], "weight_decay": 0.3},
                    {"params": [p for p in chosen.values() if p.ndim < 2], "weight_decay": 0.0},
                ],
                lr=optim.learning_rate,
                fused=True,
            )
        for name, gradient in gradients.items():
            chosen[name].grad = gradient
        adamw.step()
        kept.update((n, p.detach().clone()) for n, p in chosen.items())
    assert_same(final_weights(tmp_path / "run"), kept)


def test_a_state_of_another_block_than_that_of_the_step_is_refused(project, tmp_path):
    build(at(project, tmp_path / "cut", BADAM, 2), callbacks=[Watch(last=2)]).fit()
    other = at(project, tmp_path / "rest", Full(), 2)
    with pytest.raises(RunError, match=r"other settings \(method: badam -> full\)"):
        build(other, resume=tmp_path / "cut" / "checkpoint-2")


def blocks_of(method, model, seed=0):
    module = method.apply(model)
    names = {name: name for name, _ in module.named_parameters()}
    return method.trainable(names_by_part(module, model, names), seed)


def labels(method, model, turns, seed=0):
    blocks = blocks_of(method, model, seed)
    return [blocks.labels(turn * method.switch_interval) for turn in range(turns)]


def test_the_orders():
    def numbers(turns=7, seed=0, **settings):
        found = labels(BAdam(**settings), tiny.model(), turns, seed)
        return "".join(label.removeprefix("layer ") for (label,) in found)

    assert numbers() == "0120120"
    assert numbers(order="ascending", start_block=2) == "2012012"
    assert numbers(order="descending") == "2102102"
    assert numbers(order="descending", start_block=0) == "0210210"
    assert numbers(order="fixed", start_block=1) == "1111111"
    drawn = numbers(turns=60, order="random")
    passes = {drawn[start : start + 3] for start in range(0, 60, 3)}
    assert all(sorted(one) == ["0", "1", "2"] for one in passes) and len(passes) > 3
    assert drawn == numbers(turns=60, order="random") != numbers(60, seed=1, order="random")


def test_lisa_draws_layers_and_trains_the_rest_at_every_step():
    blocks = blocks_of(LISA(), tiny.model())
    assert blocks.always == ENDS
    found = [blocks.labels(20 * turn) for turn in range(60)]
    assert all(len({*one}) == 2 for one in found) and len({tuple(one) for one in found}) == 3
    for label in blocks.blocks:  # each with the same chance
        assert 25 < sum(label in one for one in found) < 55


@pytest.mark.parametrize("is_tied", [False, True])
def test_embeddings_and_head_may_be_blocks(is_tied):
    method = BAdam(embeddings_and_head=True)
    blocks = blocks_of(method, tiny.model(tie_word_embeddings=is_tied))
    found = {label: names for label, names in blocks.blocks.items() if "layer" not in label}
    ends = {
        "embeddings": {"model.embed_tokens.weight"},
        "head": ENDS - {"model.embed_tokens.weight"},
    }
    together = {"embeddings and head": ENDS - {"lm_head.weight"}}
    assert found == (together if is_tied else ends)
    assert next(iter(blocks.blocks)).startswith("embeddings")
    assert not blocks_of(BAdam(), tiny.model()).in_turn & ENDS


def test_layers_are_found_whatever_they_are_called():
    config = GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=32, n_positions=16)
    blocks = blocks_of(BAdam(embeddings_and_head=True), GPT2LMHeadModel(config))
    assert list(blocks.blocks) == ["embeddings and head", "layer 0", "layer 1"]
    assert "transformer.h.1.mlp.c_fc.weight" in blocks.blocks["layer 1"]
    assert "transformer.wpe.weight" in blocks.blocks["embeddings and head"]


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        (BAdam, {"switch_interval": 0}, "switch_interval must be at least 1, got 0"),
        (BAdam, {"switch_interval": -1}, "switch_interval must be at least 1, got -1"),
        (BAdam, {"start_block": -2}, "start_block must not be negative, got -2"),
        (BAdam, {"order": "fixed"}, "start_block must say which block"),
        (BAdam, {"order": "random", "start_block": 1}, "leave it out"),
        (LISA, {"switch_interval": 0}, "switch_interval must be at least 1, got 0"),
        (LISA, {"num_layers": 0}, "num_layers must be at least 1, got 0"),
    ],
)
def test_settings_that_mean_nothing_are_refused(method, settings, message):
    with pytest.raises(ValueError, match=message):
        method(**settings)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (BAdam(start_block=3), "start_block: expected at most 2, as the model has 3 blocks, got 3"),
        (LISA(num_layers=4), "num_layers: expected at most 3, the layers of the model, got 4"),
    ],
)
def test_blocks_that_do_not_exist_are_refused(method, message):
    with pytest.raises(RecipeError, match=message):
        blocks_of(method, tiny.model())


@pytest.mark.parametrize("method", [BAdam(), LISA()])
def test_a_model_without_layers_is_refused(method):
    with pytest.raises(ModelError, match="found no list of layers"):
        method.apply(torch.nn.Linear(2, 2))
