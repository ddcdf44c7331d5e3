"""Update rules against their papers, written out in float64, and against torch's."""

import math
from dataclasses import replace

import pytest
import torch

from surefoot.errors import RecipeError
from surefoot.optim._rules.few_bits import chunked, codebook, dequantized, dynamic_map, quantize
from surefoot.optim._rules.rule_optimizer import Update
from surefoot.optim._variants.adafactor import Adafactor
from surefoot.optim._variants.adam_mini import AdamMini
from surefoot.optim._variants.adamw import AdamW, AdamW4bit, AdamW8bit, AdamWBf16
from surefoot.optim._variants.ademamix import AdEMAMix
from surefoot.optim._variants.lion import Lion
from surefoot.optim._variants.projected import Apollo, GaLore
from surefoot.optim._variants.schedule_free import ScheduleFree
from surefoot.optim.state import check_cuts
from surefoot.optim.state_tensor import ParameterKind
from surefoot.parallel.sharding import AxisShard

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
    usual = {"learning_rate": 0.01, "weight_decay": 0.3, "beta1": 0.8, "beta2": 0.95}
    optim = Apollo(**usual, rank=2, update_gap=4, scaling=scaling, scale=4.0)
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
    known = dynamic_map(8, is_signed=is_signed)
    assert len(known) == len(known.unique()) == 256
    assert torch.equal(known, known.sort()[0])
    assert 0.0 in known
    assert float(known.max()) == 1
    assert known.abs()[known != 0].min() < 1e-6
    assert (float(known.min()) < -0.99) == is_signed


SIGNED = [0.0055, 0.0325, 0.0775, 0.2125, 0.4375, 0.6625, 0.8875]  # arXiv:2309.01507, as in lpmm
FOUR = {
    True: [*(-one for one in reversed(SIGNED)), 0.0, *SIGNED, 1.0],
    False: [(one + 1) / 16 for one in range(16)],
}


@pytest.mark.parametrize("is_signed", [True, False])
@pytest.mark.parametrize(("bits", "block"), [(8, 256), (4, 128)])
def test_codes_are_of_the_nearest_value_of_their_block(bits, block, is_signed):
    torch.manual_seed(0)
    values = torch.randn(6, 701) * torch.tensor([1e-30, 1e-3, 1.0, 0.0, 1e9, 1.0])[:, None]
    values[5, ::2] *= 1e-5
    values = values if is_signed else values.abs()
    width = 701 if bits == 8 else 351
    codes, scales = torch.empty(6, width, dtype=torch.uint8), torch.empty(6, -(-701 // block))
    book = codebook(bits, block, torch.device("cpu"), is_signed=is_signed)
    quantize(values.clone(), codes, scales, book)
    found = dequantized(codes, scales, 701, book)
    known = dynamic_map(8, is_signed=is_signed) if bits == 8 else torch.tensor(FOUR[is_signed])
    for numbers, block_found in zip(values.split(block, 1), found.split(block, 1), strict=True):
        scale = numbers.abs().amax(1, keepdim=True)
        relative = numbers / scale.clamp(min=1e-38)
        nearest = known[(relative[..., None] - known).abs().argmin(-1)]
        far = (block_found / scale.clamp(min=1e-38) - relative).abs()
        is_tiny = (relative < 3e-7) & (relative > 0) if bits == 8 and not is_signed else False
        assert ((far <= (nearest - relative).abs() + 1e-7) | ~scale.bool() | is_tiny).all()
        assert not block_found[3].any()
        if not is_signed:
            assert ((block_found > 0) | (numbers == 0)).all()


@pytest.mark.parametrize("is_signed", [True, False])
@pytest.mark.parametrize("bits", [8, 4])
def test_no_cell_of_a_codebook_has_two_middles(bits, is_signed):
    middles = codebook(bits, 128, torch.device("cpu"), is_signed=is_signed).middles[:-1]
    assert len((middles.view(torch.int32) >> 16).unique()) == len(middles) == 2**bits - 1


def test_moments_that_are_not_numbers_stay_so():
    book = codebook(8, 256, torch.device("cpu"), is_signed=True)
    codes, scales = torch.empty(2, 300, dtype=torch.uint8), torch.empty(2, 2)
    values = torch.ones(2, 300)
    values[0, 0], values[1, 299] = float("nan"), float("-inf")
    quantize(values, codes, scales, book)
    found = dequantized(codes, scales, 300, book)
    assert found[0, :256].isnan().all()
    assert not found[1, 256:].isfinite().any()
    assert torch.equal(found[0, 256:], torch.ones(44))


def test_chunks_are_the_same_rows_of_all_tensors():
    wide, narrow = torch.arange(600_000).view(3, 200, 1000), torch.arange(1200).view(3, 200, 2)
    found = [*chunked(wide, narrow)]
    assert len(found) > 3
    assert torch.equal(torch.cat([one for one, _ in found]), wide.view(600, 1000))
    assert torch.equal(torch.cat([one for _, one in found]), narrow.view(600, 2))
    vector = torch.arange(300_000)
    assert torch.equal(torch.cat([one.view(-1) for (one,) in chunked(vector)]), vector)
    assert [one.shape for (one,) in chunked(wide.mT)] == [wide.mT.shape]
    assert not [*chunked(torch.empty(0, 5))]


@pytest.mark.parametrize("made", [AdamWBf16, AdamW8bit, AdamW4bit, Lion])
def test_the_memory_order_of_a_gradient_does_not_matter(made):
    ends = []
    for grad in (torch.randn(40, 30, generator=torch.Generator().manual_seed(0)),) * 2:
        parameter = torch.nn.Parameter(torch.ones(40, 30))
        optimizer = made(learning_rate=0.1).build([("w", parameter)])
        for _ in range(2):
            parameter.grad = grad if not ends else grad.t().contiguous().t()
            optimizer.step()
        ends.append(parameter.detach())
    torch.testing.assert_close(*ends)


@pytest.mark.parametrize(("made", "times"), [(AdamWBf16, 1), (AdamW8bit, 1), (AdamW4bit, 4.5)])
def test_narrow_moments_train_as_wide_ones_in_the_mean(made, times):
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
    assert distance(made(**usual)) == pytest.approx(times * distance(AdamW(**usual)), rel=0.1)


@pytest.mark.parametrize("made", [AdamW8bit, AdamW4bit])
def test_a_row_without_gradient_after_one_makes_steps_as_adamw(made):
    """As embeddings of tokens that few batches have: a second moment far below the largest of its
    block must not become zero, since the first is divided by it."""

    def way(optim):
        parameter = torch.nn.Parameter(torch.zeros(3, 300))
        optimizer = optim.build([("w", parameter)])
        for step in range(4):
            parameter.grad = torch.zeros(3, 300)
            if step == 0:
                parameter.grad[:2] = torch.logspace(-6, 0, 300)
            optimizer.step()
        return float(parameter.detach().abs().max())

    assert way(made(learning_rate=0.1)) < 1.5 * way(AdamW(learning_rate=0.1))


@pytest.mark.parametrize("made", [AdamW8bit, AdamW4bit])
def test_codes_refuse_shards_of_columns(made):
    cut = (AxisShard("tp", 1),)
    check_cuts(made(), (8, 6), (AxisShard("dp_shard", 0),), "w")
    check_cuts(AdamW(), (8, 6), cut, "w")
    with pytest.raises(RecipeError, match=r"cannot shard .* of w\) over parallel.tp; set it"):
        check_cuts(made(), (8, 6), cut, "w")


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
        (lambda: AdamW(learning_rate=0.0), "learning_rate"),
        (lambda: AdamW(warmup_ratio=1.5), "warmup_ratio"),
        (lambda: AdamW(epsilon=0.0), "epsilon"),
    ],
)
def test_settings_that_make_no_sense_are_refused(made, message):
    with pytest.raises(ValueError, match=message):
        made()
