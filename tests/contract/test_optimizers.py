"""What every optimizer owes every method: a state as declared, and exact resume, on any mesh."""

import itertools
import math

import pytest
import torch

import ranks
import surefoot.checkpoint as ckpt
import tiny
from adapted import FITTING, method_of
from each import some
from kept import assert_bitwise, everything
from spread import learn, resume, save, trainer
from surefoot.network._parameter_names import kinds_of, names_by_part
from surefoot.optim import OPTIMIZERS
from surefoot.optim._rules import orthogonalization
from surefoot.optim.bf16_weights import MASTER
from surefoot.optim.optimizer import SCHEDULES, declared_state
from surefoot.optim.state import dtype_of
from surefoot.optim.state_tensor import LIKE_PARAMETER
from surefoot.optim.trained import TrainedParameters
from surefoot.parallel.world import ALONE

MODES = ["stochastic", "master", "nearest"]
BOTH = [(optim, method) for optim, methods in FITTING.items() for method in methods]
SETTINGS = {"apollo": {"rank": 4, "update_gap": 2}, "galore": {"rank": 4, "update_gap": 2}}


def made_of(optim, **changes):
    """An optimizer whose numbers show what it does in a few steps of a tiny model."""
    return OPTIMIZERS[optim](**{"learning_rate": 5e-3, **SETTINGS.get(optim, {}), **changes})


# One method for each optimizer, another from one to the next; the others only in the proof.
DIAGONAL = [
    (optim, methods[i % len(methods)]) for i, (optim, methods) in enumerate(FITTING.items())
]
IN_BF16 = [*itertools.product(OPTIMIZERS, MODES)]


class Run:
    """A tiny model with a method and an optimizer."""

    def __init__(self, method, optim, dtype=torch.float32, **changes):
        torch.manual_seed(0)
        self.method, self.optim = method_of(method), made_of(optim, **changes)
        inner = tiny.model(num_hidden_layers=2)
        self.model = self.method.apply(inner).to(dtype)
        named = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        parts = names_by_part(self.model, inner, {n: n for n, _ in self.model.named_parameters()})
        blocks = self.method.trainable(parts, 0)
        self.layouts = kinds_of(inner, named)
        self.trained = TrainedParameters(
            self.optim, named, blocks.trainable, layouts=self.layouts, entries=blocks.entries
        )
        self.states = {
            "model": self.method.weights(self.model, inner),
            "optimizer": self.trained,
        }

    def train(self, steps):
        for step in steps:
            optimizer = self.trained.at(step)
            ids = torch.arange(3, 9).roll(step)[None]
            self.model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def must_resume(first, second, folder):
    """``second`` resumes from a checkpoint of ``first``, and both end in the same bits."""
    first.train(range(3))
    saved = ckpt.save(folder, 3, first.states, kind=first.states["model"].kind)
    first.train(range(3, 5))
    ckpt.load(saved, second.states)
    second.trained.check(3)
    second.train(range(3, 5))
    for name, parameter in first.trained.named.items():
        assert torch.equal(parameter, second.trained.named[name]), name


@pytest.mark.parametrize(("optim", "method"), some(BOTH, DIAGONAL))
def test_an_optimizer_of_a_method_resumes_to_the_same_bits(optim, method, tmp_path):
    must_resume(Run(method, optim), Run(method, optim), tmp_path)


@pytest.mark.parametrize(
    ("optim", "mode"), some(IN_BF16, [*zip(OPTIMIZERS, itertools.cycle(MODES))])
)
def test_bfloat16_weights_resume_to_the_same_bits(optim, mode, tmp_path):
    made = (Run("full", optim, torch.bfloat16, bf16_weights=mode) for _ in range(2))
    must_resume(*made, tmp_path)


def changes_of(optim, method):
    return {"method": method_of(method), "optim": made_of(optim, weight_decay=0.1)}


def killed(world, folder, changes):
    """What a run learns that starts again at a checkpoint, and all that it has then."""
    made = resume(trainer(world, folder.parent, **changes), folder)
    return learn(made, 2), everything(made)


def on_two_ranks(combinations, folder):
    """Train each on two ranks, resume it there, and compare; the checkpoint and the losses. All in
    the same two processes, whose start would take longer."""

    def one(world, names):
        changes = changes_of(*names)
        made = trainer(world, folder, **changes)
        first = learn(made, 2)
        saved = save(made, folder)
        losses, end = first + learn(made, 2), everything(made)
        again, state = killed(world, saved, changes)
        assert again == losses[2:]
        assert_bitwise(state, end)
        kept = saved.rename(folder / "-".join(names)) if world.is_main else None
        world.wait()
        return kept, losses

    def work(world):
        return {names: one(world, names) for names in combinations}

    (found, others) = ranks.run(2, work, dp_shard=2, timeout=300)
    for names, (_, losses) in found.items():
        assert losses == others[names][1], names
    return found


def must_be_as_alone(names, folder, losses):
    """One process learns what two did, and resumes their checkpoint."""
    changes = changes_of(*names)
    expected = learn(trainer(ALONE, folder.parent, **changes), 4)
    for other in (losses, losses[:2] + killed(ALONE, folder, changes)[0]):
        for ours, theirs in zip(other, expected, strict=True):
            assert ours == pytest.approx(theirs, rel=2e-3)


@pytest.fixture(scope="module")
def rounds_alike():
    """Muon's iterations in float64, to round alike on any mesh."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(orthogonalization, "NS_DTYPE", torch.float64)
        yield


ON_RANKS = DIAGONAL[::2]


@pytest.fixture(scope="module")
def diagonal(rounds_alike, tmp_path_factory):
    return on_two_ranks(ON_RANKS, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("names", ON_RANKS, ids="-".join)
def test_two_ranks_learn_what_one_does_and_resume_here_and_alone(names, diagonal):
    must_be_as_alone(names, *diagonal[names])


@pytest.mark.proof
@pytest.mark.parametrize("names", [n for n in BOTH if n not in ON_RANKS], ids="-".join)
def test_two_ranks_of_every_optimizer_and_method(names, rounds_alike, tmp_path):
    must_be_as_alone(names, *on_two_ranks([names], tmp_path)[names])


MESHES = [{"tp": 2}, {"pp": 2}, {"dp_replicate": 2}, {"dp_shard": 2, "tp": 2}]
CANNOT = {"adamw_8bit": {"tp"}, "adamw_4bit": {"tp"}}


@pytest.mark.proof
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_a_mesh_learns_what_one_process_does_and_one_resumes_it(optim, mesh, tmp_path, monkeypatch):
    monkeypatch.setattr(orthogonalization, "NS_DTYPE", torch.float64)  # to round alike
    changes = {"optim": made_of(optim, weight_decay=0.1)}

    def work(world):
        made = trainer(world, tmp_path, **changes)
        first = learn(made, 2)
        folder = save(made, tmp_path)
        losses = learn(made, 1)
        again = resume(trainer(world, tmp_path, **changes), folder)
        assert learn(again, 1) == losses
        return str(folder), first + losses

    count = math.prod(mesh.values())
    if CANNOT.get(optim, set()) & mesh.keys():
        with pytest.raises(AssertionError, match=r"cannot shard its state .* parallel\.tp; set it"):
            ranks.run(count, work, **mesh)
        return
    expected = learn(trainer(ALONE, tmp_path, **changes), 3)
    folder, losses = ranks.run(count, work, **mesh)[0]
    alone = resume(trainer(ALONE, tmp_path, **changes), folder)
    for other in (losses, losses[:2] + learn(alone, 1)):
        for ours, theirs in zip(other, expected, strict=True):
            assert ours == pytest.approx(theirs, rel=2e-3)


@pytest.mark.parametrize(
    "optim",
    [
        pytest.param(one, marks=[] if one == "adafactor" else pytest.mark.proof)
        for one in OPTIMIZERS
    ],
)
def test_fused_experts_are_saved_by_two_ranks_and_resumed_by_one(optim, tmp_path):
    changes = {"kind": "qwen3_moe", "optim": made_of(optim)}

    def work(world):
        made = trainer(world, tmp_path, **changes)
        learn(made, 2)
        folder = save(made, tmp_path)
        return str(folder), everything(made), learn(made, 1)

    folder, held, (expected,) = ranks.run(2, work, dp_shard=2)[0]
    alone = resume(trainer(ALONE, tmp_path, **changes), folder)
    state = {name: one for name, one in held.items() if not name.startswith("model/")}
    found = everything(alone)
    assert_bitwise({name: found[name] for name in state}, state)
    assert learn(alone, 1)[0] == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_an_optimizer_declares_its_state(optim):
    modes = [(torch.float32, "stochastic"), *itertools.product([torch.bfloat16], MODES)]
    for dtype, mode in modes:
        run = Run("full", optim, dtype, bf16_weights=mode)
        run.train(range(1))
        seen = set()
        for name, state in run.trained.state_dict().items():
            parameter = run.trained.named[name]
            shape = tuple(parameter.shape)
            declared = declared_state(run.optim, shape, run.layouts[name])
            if dtype == torch.bfloat16 and mode == MASTER:
                declared[MASTER] = LIKE_PARAMETER
            assert {key: (tuple(t.shape), t.dtype) for key, t in state.items()} == {
                key: (one.shape(shape), dtype_of(one, dtype, mode)) for key, one in declared.items()
            }
            seen |= state.keys()
        assert seen - {MASTER} == run.optim.state_tensors.keys()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_an_optimizer_takes_every_schedule(optim, schedule):
    made = OPTIMIZERS[optim](learning_rate=0.1, schedule=schedule, warmup_ratio=0.5)
    factors = [made.schedule_over(10).factor(step) for step in range(10)]
    assert factors[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert all(0 <= factor <= 1 for factor in factors)
    with pytest.raises(ValueError, match="warmup_ratio"):
        OPTIMIZERS[optim](warmup_ratio=2.0)
