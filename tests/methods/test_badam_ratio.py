"""BAdam's ratio mode: some entries of every matrix at a time, with the state of these alone."""

from dataclasses import replace

import pytest
import torch

import tiny
from small import StopAt, assert_same_weights, resume, trainer, weights
from surefoot.errors import CheckpointError, RecipeError
from surefoot.methods import BAdamRatio
from surefoot.network._parameter_names import names_by_part
from surefoot.optim import OPTIMIZERS
from surefoot.optim._variants.adamw import AdamW
from surefoot.optim.blocks import check_entries
from surefoot.optim.trained import TrainedParameters
from surefoot.parallel.sharding import AxisShard

INTERVAL, RATIO = 3, 0.25
MASKS = ["adjacent", "scatter"]


def ratio(mask="adjacent", **changes):
    settings = {"update_ratio": RATIO, "switch_interval": INTERVAL, "mask": mask}
    return BAdamRatio(**{**settings, **changes})


class Tuned:
    """A tiny model, and the optimizer of the entries that a method trains."""

    def __init__(self, method, optim=None, seed=0, **changes):
        inner = tiny.model(num_hidden_layers=2, **changes)
        self.model = method.apply(inner)
        names = {name: name for name, _ in self.model.named_parameters()}
        self.blocks = method.trainable(names_by_part(self.model, inner, names), seed)
        self.named = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        optim = optim or AdamW(learning_rate=1e-2, weight_decay=0.3)
        entries = self.blocks.entries
        self.trained = TrainedParameters(optim, self.named, self.blocks.trainable, entries=entries)

    def gradients(self, step, parts=2):
        optimizer = self.trained.at(step)
        for part in range(parts):
            ids = torch.arange(3, 9).roll(step + part)[None]
            self.model(input_ids=ids, labels=ids).loss.backward()
        return optimizer

    def step(self, step):
        optimizer = self.gradients(step)
        optimizer.step()
        optimizer.zero_grad()


def changed(tuned, step):
    """Whether each entry of each parameter is changed by a step."""
    before = {name: p.detach().clone() for name, p in tuned.named.items()}
    tuned.step(step)
    return {name: p != before[name] for name, p in tuned.named.items()}


@pytest.mark.parametrize("mask", MASKS)
def test_every_entry_of_every_row_has_its_turn(mask):
    tuned = Tuned(ratio(mask, embeddings_and_head=True))
    found = [changed(tuned, step) for step in range(4 * INTERVAL)]
    for name, parameter in tuned.named.items():
        turns = [found[step][name] for step in range(0, len(found), INTERVAL)]
        if parameter.ndim < 2:  # norms
            assert all(one.all() for one in turns)
            continue
        width = parameter.shape[-1]
        assert all((one.sum(-1) <= RATIO * width).all() for one in turns)
        once = torch.stack(turns).sum(0)
        if "embed" not in name:  # rows of tokens that occur have gradients
            assert (once == 1).all(), name
            is_alike = all((one == one[0]).all() for one in turns)
            assert is_alike == (mask == "adjacent"), name
    for step, one in enumerate(found):
        for name, first in found[step // INTERVAL * INTERVAL].items():
            assert torch.equal(one[name], first) or "embed" in name


def test_masks_are_drawn_from_the_seed_and_the_name():
    def of(seed):
        tuned = Tuned(ratio("scatter"), seed=seed)
        return changed(tuned, 0)

    first, again, other = of(1), of(1), of(2)
    up, gate = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.gate_proj.weight"
    assert torch.equal(first[up], again[up]) and not torch.equal(first[up], other[up])
    assert not torch.equal(first[up], first[gate])  # of the same shape


def gradients_of(tuned, values, step, parts=2):
    """The gradients of ``values`` in float64, of the batches of a step."""
    for name, parameter in tuned.named.items():
        parameter.data.copy_(values[name])
    losses = []
    for part in range(parts):
        ids = torch.arange(3, 9).roll(step + part)[None]
        losses.append(tuned.model(input_ids=ids, labels=ids).loss)
    found = torch.autograd.grad(sum(losses), [*tuned.named.values()])
    return {name: grad.double() for name, grad in zip(tuned.named, found, strict=True)}


@pytest.mark.parametrize("mask", MASKS)
def test_entries_are_trained_as_by_adamw_on_them_alone(mask):
    """Against AdamW written out in float64, with new moments for each turn of a matrix."""
    tuned, plain = Tuned(ratio(mask)), Tuned(ratio(mask))
    values = {name: p.detach().double() for name, p in tuned.named.items()}
    moments, since = {}, {}
    for step in range(2 * INTERVAL + 1):
        given, chosen = gradients_of(plain, values, step), changed(tuned, step)
        for name, grad in given.items():
            if step == 0 or (step % INTERVAL == 0 and grad.ndim > 1):
                moments[name], since[name] = (torch.zeros_like(grad), torch.zeros_like(grad)), 0
            since[name] += 1
            mean, square = moments[name]
            mean.mul_(0.9).add_(grad, alpha=0.1)
            square.mul_(0.999).add_(grad**2, alpha=0.001)
            root = (square / (1 - 0.999 ** since[name])).sqrt() + 1e-8
            new = values[name] * (1 - 1e-2 * 0.3 * (grad.ndim > 1))
            new = new - 1e-2 * mean / (1 - 0.9 ** since[name]) / root
            expected = chosen[name]
            if mask == "adjacent" and grad.ndim > 1:
                width = grad.shape[-1]
                columns = (torch.arange(width // 4) + step // INTERVAL * width // 4) % width
                expected = torch.zeros_like(grad, dtype=torch.bool)
                expected[:, columns] = True
            expected = torch.where(expected, new, values[name])
            values[name] = tuned.named[name].detach().double()
            torch.testing.assert_close(values[name], expected, rtol=1e-4, atol=2e-5)


def test_state_and_gradients_are_of_the_size_of_the_ratio():
    tuned = Tuned(ratio())
    tuned.gradients(0)
    matrices = {name: p.numel() for name, p in tuned.named.items() if p.ndim > 1}
    assert all(tuned.named[name].grad is None for name in matrices)
    groups = tuned.trained.optimizer.param_groups
    kept = sum(p.grad.numel() for group in groups for p in group["params"] if p.ndim > 1)
    assert kept == RATIO * sum(matrices.values())
    tuned.step(0)
    for name, state in tuned.trained.state_dict().items():
        for key in ("exp_avg", "exp_avg_sq"):
            size = matrices.get(name)
            assert state[key].numel() == (RATIO * size if size else tuned.named[name].numel())
    tuned.gradients(1)
    tuned.trained.drop_gradients()
    assert not any(p.grad is not None for group in groups for p in group["params"] if p.ndim > 1)


@pytest.mark.parametrize(
    ("mask", "dtype"),
    [
        pytest.param("scatter", torch.float32, marks=pytest.mark.proof),
        pytest.param("adjacent", torch.bfloat16, marks=pytest.mark.proof),
        pytest.param("adjacent", torch.float32, marks=pytest.mark.proof),
        pytest.param("scatter", torch.bfloat16, marks=pytest.mark.proof),
    ],
)
def test_a_run_resumes_to_the_same_bits_inside_a_turn_and_on_its_edge(mask, dtype, tmp_path):
    def made(folder, *members, **changes):
        mode = "master" if dtype == torch.bfloat16 else "stochastic"
        optim = AdamW(learning_rate=5e-3, weight_decay=0.1, bf16_weights=mode)
        model = tiny.model(attention_dropout=0.1, dtype=dtype)
        options = {"method": ratio(mask), "optim": optim, "model": model, "save_steps": 1}
        return trainer(tmp_path / folder, *members, **{**options, **changes})

    whole = made("whole", keep=9)
    whole.fit()
    for saved in (5, 6):
        other = resume(made(f"rest-{saved}"), tmp_path / "whole" / f"checkpoint-{saved}")
        other.policy.trained.check(saved)
        other.fit()
        assert_same_weights(weights(other), weights(whole))


OTHERS = [{"switch_interval": 2}, {"update_ratio": 0.5}, {"mask": "scatter"}]


@pytest.mark.parametrize("changes", OTHERS, ids=str)
def test_a_state_of_other_entries_is_refused(changes):
    first = Tuned(ratio())
    first.step(0)
    state = first.trained.state_dict()
    same, other = Tuned(ratio()), Tuned(ratio(**changes))
    for tuned in (same, other):
        tuned.trained.load_state_dict(state)
    same.trained.check(1)
    with pytest.raises(CheckpointError, match="state of other entries"):
        other.trained.check(1)
    with pytest.raises(CheckpointError, match="state of other entries"):
        same.trained.load_state_dict(state)
        same.trained.check(INTERVAL + 1)  # the next turn
    bare = {name: {k: t for k, t in one.items() if k != "entries"} for name, one in state.items()}
    full = TrainedParameters(AdamW(), same.named)
    for trained, other in ((same.trained, bare), (full, state)):
        with pytest.raises(CheckpointError, match="state of other entries"):
            trained.load_state_dict(other)


@pytest.mark.parametrize("mask", MASKS)
def test_another_seed_has_other_entries_only_if_they_are_drawn(mask):
    first, other = Tuned(ratio(mask)), Tuned(ratio(mask), seed=1)
    first.step(0)
    other.trained.load_state_dict(first.trained.state_dict())
    if mask == "adjacent":
        other.trained.check(1)
        return
    with pytest.raises(CheckpointError, match=r"train\.seed"):
        other.trained.check(1)


def test_the_norm_is_that_of_the_trained_entries(tmp_path):
    seen = []

    class Watch(StopAt):
        def on_pre_optimizer_step(self, args, state, control):
            named = args.learner.trained.optimizer.param_groups
            seen.extend(p.grad.norm() for group in named for p in group["params"])

    made = trainer(tmp_path, Watch(1), method=ratio(), max_grad_norm=1e-3, save_steps=None)
    made.fit()
    assert torch.stack(seen).norm() == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_of_whole_matrices_are_refused(name):
    optim = OPTIMIZERS[name](learning_rate=1e-2)
    if optim.is_entrywise:
        Tuned(ratio(), optim).step(0)
        return
    with pytest.raises(RecipeError, match=f"{type(optim).__name__} updates matrices as a whole"):
        Tuned(ratio(), optim)


def test_sharded_rows_are_refused():
    turns = Tuned(ratio()).blocks.entries
    name = next(iter(turns.names))
    shapes = {name: (8, 8)}
    for dim, axis in ((0, "dp_shard"), (1, "tp")):
        cuts = {name: (AxisShard(axis, dim),)}
        if dim == 0:
            check_entries(turns, AdamW(), shapes, cuts)
            continue
        with pytest.raises(RecipeError, match=r"parallel\.tp: .* rows of .* are sharded"):
            check_entries(turns, AdamW(), shapes, cuts)


def test_a_ratio_of_one_trains_all_and_keeps_its_state():
    tuned = Tuned(ratio(update_ratio=1.0))
    for step in range(INTERVAL + 1):
        tuned.step(step)
    assert {int(state["step"]) for state in tuned.trained.state_dict().values()} == {INTERVAL + 1}


@pytest.mark.parametrize("value", [0.0, -0.1, 1.5])
def test_a_ratio_that_means_nothing_is_refused(value):
    with pytest.raises(ValueError, match="update_ratio must be above 0 and at most 1"):
        replace(ratio(), update_ratio=value)
