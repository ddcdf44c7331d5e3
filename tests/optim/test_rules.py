"""Update rules against their papers, written out in float64, and against torch's."""

import math
from dataclasses import replace

import pytest
import torch

from surefoot.optim.parameter_kind import ParameterKind
from surefoot.optim.rules.rule_optimizer import Update
from surefoot.optim.variants.adafactor import Adafactor
from surefoot.optim.variants.adam_mini import AdamMini
from surefoot.optim.variants.ademamix import AdEMAMix
from surefoot.optim.variants.apollo import Apollo
from surefoot.optim.variants.galore import GaLore
from surefoot.optim.variants.lion import Lion

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
