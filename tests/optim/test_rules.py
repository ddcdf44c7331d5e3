"""Update rules against their papers, written out in float64, and against torch's."""

import math
from dataclasses import replace

import pytest
import torch

from surefoot.errors import RecipeError
from surefoot.geometry.sharding import AxisShard
from surefoot.optim.adamw import AdamW
from surefoot.optim.parameter_kind import ParameterKind
from surefoot.optim.rules.blockwise import dequantized, dynamic_map, quantize
from surefoot.optim.rules.rule_optimizer import Update
from surefoot.optim.state_cuts import check_cuts
from surefoot.optim.variants.adafactor import Adafactor
from surefoot.optim.variants.adam_mini import AdamMini
from surefoot.optim.variants.adamw_8bit import AdamW8bit
from surefoot.optim.variants.adamw_bf16 import AdamWBf16
from surefoot.optim.variants.ademamix import AdEMAMix
from surefoot.optim.variants.apollo import Apollo
from surefoot.optim.variants.galore import GaLore
from surefoot.optim.variants.lion import Lion
from surefoot.optim.variants.schedule_free import ScheduleFree

SHAPES = {"q.weight": (6, 4), "up.weight": (5, 3), "norm.weight": (4,)}
LAYOUTS = {"q.weight": ParameterKind(True, head_size=3), "up.weight": ParameterKind(True)}


def parameters():
    torch.manual_seed(0)
    return {name: torch.randn(shape, dtype=torch.float64) for name, shape in SHAPES.items()}


def gradient(value, step):
    return torch.sin(value * step + value.ndim)


def compare(optim, rule, steps=9, close=1e-7):
    """``rule(x, g, t, state, decay)`` returns the weights after update ``t``."""
    ours = {name: torch.nn.Parameter(p) for name, p in parameters().items()}
    optimizer = optim.build(list(ours.items()), LAYOUTS)
    theirs, states = parameters(), {name: {} for name in SHAPES}
    for t in range(1, steps + 1):
        for parameter in ours.values():
            parameter.grad = gradient(parameter.detach(), t)
        optimizer.step()
        for name, x in theirs.items():
            decay = optim.weight_decay if x.ndim > 1 else 0.0
            theirs[name] = rule(name, x, gradient(x, t), t, states[name], decay)
    for name, x in theirs.items():
        torch.testing.assert_close(ours[name].detach(), x, rtol=close, atol=close, msg=name)


def test_lion_is_the_papers():
    optim = Lion(learning_rate=0.01, weight_decay=0.3, beta1=0.8, beta2=0.95)

    def rule(_, x, g, t, state, decay):
        m = state.get("m", torch.zeros_like(x))
        c = 0.8 * m + 0.2 * g
        state["m"] = 0.95 * m + 0.05 * g
        return x - 0.01 * (c.sign() + decay * x)

    compare(optim, rule)


@pytest.mark.parametrize("ramp", [None, 6])
def test_ademamix_is_the_papers(ramp):
    optim = AdEMAMix(
        learning_rate=0.01, weight_decay=0.3, beta1=0.8, beta2=0.95, beta3=0.99, ramp_steps=ramp
    )

    def half_life(beta):
        return math.log(0.5) / math.log(beta) - 1

    def rule(_, x, g, t, state, decay):
        m1, m2, v = state.get("all", [torch.zeros_like(x)] * 3)
        share = 1.0 if ramp is None else min(1.0, t / ramp)
        alpha, beta3 = 5.0 * share, 0.99
        if share < 1:  # linear between the half-lives, as the paper defines it
            steps = (1 - share) * half_life(0.8) + share * half_life(0.99)
            beta3 = 0.5 ** (1 / (steps + 1))
        m1, m2 = 0.8 * m1 + 0.2 * g, beta3 * m2 + (1 - beta3) * g
        v = 0.95 * v + 0.05 * g * g
        state["all"] = [m1, m2, v]
        step = (m1 / (1 - 0.8**t) + alpha * m2) / ((v / (1 - 0.95**t)).sqrt() + 1e-8)
        return x - 0.01 * (step + decay * x)

    compare(optim, rule)


def test_adam_mini_has_one_second_moment_for_a_head_a_row_or_a_vector():
    optim = AdamMini(learning_rate=0.01, weight_decay=0.3, beta1=0.8, beta2=0.95)

    def rule(name, x, g, t, state, decay):
        blocks = {"q.weight": 2, "up.weight": 5, "norm.weight": 1}[name]
        m, v = state.get("m", torch.zeros_like(x)), state.get("v", [0.0] * blocks)
        state["m"] = m = 0.8 * m + 0.2 * g
        found = [float(block.square().mean()) for block in g.chunk(blocks)]
        state["v"] = v = [0.95 * old + 0.05 * new for old, new in zip(v, found, strict=True)]
        roots = [math.sqrt(one / (1 - 0.95**t)) + 1e-8 for one in v]
        parts = zip(m.chunk(blocks), roots, strict=True)
        step = torch.cat([block / (1 - 0.8**t) / root for block, root in parts])
        return x - 0.01 * (step + decay * x)

    compare(optim, rule)


@pytest.mark.parametrize("rate", [0.05, 0.9])
def test_adafactor_is_torchs(rate):
    optim = Adafactor(learning_rate=rate, weight_decay=0.1, min_scale=0.5)
    ours = [(name, torch.nn.Parameter(p)) for name, p in parameters().items()]
    theirs = [torch.nn.Parameter(p) for p in parameters().values()]
    usual = {"lr": rate, "eps": (None, 0.5)}
    expected = [
        torch.optim.Adafactor(theirs[:2], weight_decay=0.1, **usual),
        torch.optim.Adafactor(theirs[2:], **usual),
    ]
    optimizer = optim.build(ours, LAYOUTS)
    for t in range(1, 10):
        for parameter in [*(p for _, p in ours), *theirs]:
            parameter.grad = gradient(parameter.detach(), t)
        for one in [optimizer, *expected]:
            one.step()
    for (name, parameter), other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(parameter, other, msg=name)


def adam(low, t, state, beta1=0.8, beta2=0.95):
    m, v = state.get("all", [torch.zeros_like(low)] * 2)
    m, v = beta1 * m + (1 - beta1) * low, beta2 * v + (1 - beta2) * low * low
    state["all"] = [m, v]
    return m / (v.sqrt() + 1e-8), 0.01 * math.sqrt(1 - beta2**t) / (1 - beta1**t)


def test_galore_is_adam_in_the_space_of_singular_vectors():
    optim = GaLore(
        learning_rate=0.01, weight_decay=0.3, beta1=0.8, beta2=0.95, rank=2, update_gap=4, scale=0.5
    )

    def rule(_, x, g, t, state, decay):
        if x.ndim == 1:
            direction, rate = adam(g, t, state)  # epsilon is too small to matter
            return x - rate * direction
        if (t - 1) % 4 == 0:  # m >= n: project from the right
            state["p"] = torch.linalg.eigh(g.T @ g)[1][:, -2:].flip(1)
        direction, rate = adam(g @ state["p"], t, state)
        return x * (1 - 0.01 * decay) - 0.5 * rate * direction @ state["p"].T

    compare(optim, rule, steps=4, close=1e-6)


@pytest.mark.parametrize("scaling", ["channel", "tensor"])
def test_apollo_scales_the_gradient_as_adam_scales_its_projection(scaling):
    optim = Apollo(
        learning_rate=0.01,
        weight_decay=0.3,
        beta1=0.8,
        beta2=0.95,
        rank=2,
        update_gap=4,
        scaling=scaling,
        scale=4.0,
    )
    drawn = {}

    def projector(update):
        drawn[update.name, update.number] = Apollo.projector(optim, update)
        return drawn[update.name, update.number]

    object.__setattr__(optim, "projector", projector)

    def rule(name, x, g, t, state, decay):
        if x.ndim == 1:
            direction, rate = adam(g, t, state)
            return x - rate * direction
        low = g @ drawn[name, t].T
        direction, rate = adam(low, t, state)
        dim = 1 if scaling == "channel" else (0, 1)
        norm = torch.linalg.vector_norm
        change = g * norm(direction, dim=dim, keepdim=True) / norm(low, dim=dim, keepdim=True)
        if t > 1 and change.norm() > 1.01 * state["norm"]:
            change *= 1.01 * state["norm"] / change.norm()
        state["norm"] = change.norm()
        return x * (1 - 0.01 * decay) - rate * 2 * change

    compare(optim, rule, close=1e-6)
    assert torch.equal(drawn["q.weight", 1], drawn["q.weight", 4])
    assert not torch.equal(drawn["q.weight", 4], drawn["q.weight", 5])


def test_projections_are_of_the_seed_and_keep_lengths():
    parameter = torch.nn.Parameter(torch.zeros(900, 800))
    update = Update("w", parameter, {}, {}, {}, ParameterKind(True), 1)
    found = Apollo(rank=300).projector(update)
    assert found.shape == (300, 800)
    assert float(found.square().sum(0).mean()) == pytest.approx(1, abs=0.01)
    assert not torch.equal(found, Apollo(rank=300, seed=1).projector(update))
    assert not torch.equal(found, Apollo(rank=300).projector(replace(update, name="v")))


def test_schedule_free_rests_at_the_average_and_steps_from_between():
    optim = ScheduleFree(learning_rate=0.01, weight_decay=0.3, beta1=0.8, beta2=0.95)
    ours = {name: torch.nn.Parameter(p) for name, p in parameters().items()}
    optimizer = optim.build(list(ours.items()), LAYOUTS)
    xs, zs, ys = parameters(), parameters(), parameters()
    vs, total = {name: torch.zeros_like(x) for name, x in xs.items()}, 0.0
    for t in range(1, 8):
        rate = 0.01 * min(1, t / 3)  # warmup
        total += rate**2
        optimizer.move(for_gradients=True)
        for name, parameter in ours.items():
            torch.testing.assert_close(parameter.detach(), ys[name], rtol=1e-7, atol=1e-7)
            parameter.grad = gradient(parameter.detach(), t)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.move(for_gradients=False)
        for name, y in ys.items():
            g, decay = gradient(y, t), 0.3 if y.ndim > 1 else 0.0
            vs[name] = 0.95 * vs[name] + 0.05 * g * g
            root = (vs[name] / (1 - 0.95**t)).sqrt() + 1e-8
            zs[name] = zs[name] - rate * (g / root + decay * y)
            xs[name] = xs[name] + rate**2 / total * (zs[name] - xs[name])
            ys[name] = 0.8 * xs[name] + 0.2 * zs[name]
            torch.testing.assert_close(ours[name].detach(), xs[name], rtol=1e-6, atol=1e-7)


def test_a_step_that_is_skipped_leaves_schedule_free_at_its_average():
    parameter = torch.nn.Parameter(torch.randn(4, 3))
    optimizer = ScheduleFree(learning_rate=0.1).build([("w", parameter)])
    for _ in range(3):
        parameter.grad = torch.sin(parameter.detach())
        optimizer.step()
    rested = parameter.detach().clone()
    optimizer.move(for_gradients=True)
    assert not torch.equal(parameter, rested)
    optimizer.move(for_gradients=False)
    assert torch.equal(parameter, rested)


@pytest.mark.parametrize("is_signed", [True, False])
def test_the_codes_of_8_bits_span_seven_powers_of_ten(is_signed):
    known = dynamic_map(is_signed=is_signed)
    assert len(known) == len(known.unique()) == 256
    assert torch.equal(known, known.sort()[0])
    assert 0.0 in known
    assert float(known.max()) == 1
    assert known.abs()[known != 0].min() < 1e-6
    assert (float(known.min()) < -0.99) == is_signed


def test_8_bits_are_near_the_numbers_of_their_block():
    torch.manual_seed(0)
    values = torch.randn(3, 700) * torch.tensor([1e-3, 1.0, 0.0])[:, None]
    codes, scales = torch.empty(3, 700, dtype=torch.uint8), torch.empty(3, 3)
    quantize(values, codes, scales, block=256, is_signed=True)
    found = dequantized(codes, scales, block=256, is_signed=True)
    assert torch.equal(scales[:, 0], values[:, :256].abs().amax(1))
    spread = scales.repeat_interleave(256, 1)[:, :700]
    assert ((found - values).abs() <= 0.008 * spread + 1e-12).all()
    assert not found[2].any()


@pytest.mark.parametrize("made", [AdamWBf16, AdamW8bit])
def test_narrow_moments_train_as_wide_ones_in_the_mean(made):
    torch.manual_seed(0)
    target = torch.randn(16, 300)

    def distance(optim):  # from what noisy gradients lead to
        parameter = torch.nn.Parameter(torch.zeros(16, 300))
        optimizer = optim.build([("w", parameter)])
        for step in range(200):
            noise = torch.randn(16, 300, generator=torch.Generator().manual_seed(step))
            parameter.grad = parameter.detach() - target + 0.1 * noise
            optimizer.step()
        return float((parameter.detach() - target).square().mean())

    usual = {"learning_rate": 0.03, "beta2": 0.99}
    assert distance(made(**usual)) == pytest.approx(distance(AdamW(**usual)), rel=0.1)


def test_8_bits_refuse_shards_of_columns():
    cut = (AxisShard("tp", 1),)
    check_cuts(AdamW8bit(), (8, 6), (AxisShard("dp_shard", 0),), "w")
    check_cuts(AdamW(), (8, 6), cut, "w")
    with pytest.raises(RecipeError, match=r"cannot shard .* of w\) over parallel.tp; set it"):
        check_cuts(AdamW8bit(), (8, 6), cut, "w")


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: Lion(beta2=1.0), "beta2 must be in"),
        (lambda: AdEMAMix(ramp_steps=0), "ramp_steps must be at least 1"),
        (lambda: AdEMAMix(alpha=-1.0), "alpha must not be negative"),
        (lambda: Adafactor(beta2_decay=0.1), "beta2_decay must not be positive"),
        (lambda: Adafactor(min_scale=0.0), "min_scale must be positive"),
        (lambda: Apollo(rank=0), "rank must be at least 1"),
        (lambda: GaLore(update_gap=0), "update_gap must be at least 1"),
        (lambda: GaLore(scale=0.0), "scale must be positive"),
        (lambda: AdamMini(weight_decay=-1.0), "weight_decay must not be negative"),
    ],
)
def test_settings_that_make_no_sense_are_refused(made, message):
    with pytest.raises(ValueError, match=message):
        made()
