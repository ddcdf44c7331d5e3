"""K-quants beside a plain transcription of ggml's reference, and its dequantisers."""

import numpy as np
import pytest
from gguf import GGMLQuantizationType as T
from gguf import quants

from surefoot.errors import CheckpointError
from surefoot.plugins.gguf.gguf_file import pack

F = np.float32
SIZES = {T.Q4_K: 144, T.Q5_K: 176, T.Q6_K: 210}


def nearest(value):
    return int(np.rint(F(value)))


def reference_affine(x, top, first, steps):
    """make_qkx2_quants of ggml-quants.c."""
    w = [F(np.sqrt(np.sum(x * x) / F(32))) + abs(v) for v in x]
    low, high = min(F(0), min(x)), max(x)
    sum_w, sum_x = sum(w), sum(a * b for a, b in zip(w, x, strict=True))
    if high == low:
        return F(0), -low
    scale, best = (high - low) / F(top), None
    for step in [None, *range(steps + 1)]:
        inverse = (
            F(top) / (high - low) if step is None else F(first + 0.1 * step + top) / (high - low)
        )
        levels = [min(top, max(0, nearest(inverse * (v - low)))) for v in x]
        if step is None:
            new, new_low = scale, low
        else:
            l1 = sum(a * F(q) for a, q in zip(w, levels, strict=True))
            l2 = sum(a * F(q * q) for a, q in zip(w, levels, strict=True))
            lx = sum(a * F(q) * v for a, q, v in zip(w, levels, x, strict=True))
            det = sum_w * l2 - l1 * l1
            if det <= 0:
                continue
            new, new_low = (sum_w * lx - sum_x * l1) / det, (l2 * sum_x - l1 * lx) / det
            if new_low > 0:
                new, new_low = lx / l2, F(0)
        errors = [a * (new * q + new_low - v) ** 2 for a, q, v in zip(w, levels, x, strict=True)]
        if best is None or sum(errors) < best:
            best, scale, low = sum(errors), new, new_low
    return scale, -low


def reference_affine_block(x, top, first, steps):
    """What quantize_row_q4_K_ref and quantize_row_q5_K_ref store, dequantized."""
    fits = [reference_affine(part, top, first, steps) for part in x.reshape(8, 32)]
    out = []
    for values in zip(*fits, strict=True):
        largest = max(values)
        d = np.float16(largest / F(63))
        inverse = F(63) / largest if largest > 0 else F(0)
        out.append([F(d) * min(63, nearest(inverse * v)) for v in values])
    found = []
    for part, step, low in zip(x.reshape(8, 32), *out, strict=True):
        safe = step or F(1)
        levels = [min(top, max(0, nearest((v + low) / safe))) for v in part]
        found += [step * q - low for q in levels]
    return np.array(found, F)


def reference_symmetric_block(x):
    """What quantize_row_q6_K_ref stores, dequantized."""
    scales = []
    for part in x.reshape(16, 16):
        largest = part[np.argmax(np.abs(part))]
        scale = best = F(0)
        for step in [0, *range(-9, 0), *range(1, 10)] if largest else []:
            inverse = -F(32 + 0.1 * step) / largest
            levels = [min(31, max(-32, nearest(inverse * v))) for v in part]
            lx = sum(v * v * v * F(q) for v, q in zip(part, levels, strict=True))
            l2 = sum(v * v * F(q * q) for v, q in zip(part, levels, strict=True))
            if step == 0 or (l2 > 0 and lx * lx > best * l2):
                scale, best = lx / l2, lx * lx / l2
        scales.append(scale)
    largest = scales[int(np.argmax(np.abs(scales)))]
    inverse = F(-128) / largest
    d, found = np.float16(1 / inverse), []
    for part, scale in zip(x.reshape(16, 16), scales, strict=True):
        step = F(d) * min(127, nearest(inverse * scale))
        levels = [min(31, max(-32, nearest(v / (step or F(1))))) for v in part]
        found += [step * q for q in levels]
    return np.array(found, F)


REFERENCES = {
    T.Q4_K: lambda x: reference_affine_block(x, 15, -1.0, 20),
    T.Q5_K: lambda x: reference_affine_block(x, 31, -0.5, 15),
    T.Q6_K: reference_symmetric_block,
}


def unpacked(values, kind):
    rows = np.frombuffer(pack(values, kind, "w"), np.uint8).reshape(len(values), -1)
    return quants.dequantize(rows, kind)


def blocks():
    rng = np.random.default_rng(0)
    heavy = rng.standard_t(3, (2, 256))
    shifted = rng.standard_normal((2, 256)) * 0.01 + 0.02
    return np.concatenate([rng.standard_normal((4, 256)) * 0.02, heavy, shifted]).astype(F)


@pytest.mark.parametrize("kind", SIZES)
def test_blocks_are_those_of_the_reference(kind):
    x = blocks()
    with np.errstate(all="raise", under="ignore"):
        expected = np.stack([REFERENCES[kind](row) for row in x])
    found = unpacked(x, kind)
    ours, theirs = (np.sum((y - x) ** 2, axis=1) for y in (found, expected))
    assert (ours <= theirs * 1.001).all()
    assert np.mean(found == expected) > 0.95  # sums are rounded in another order


@pytest.mark.parametrize("kind", SIZES)
def test_rows_without_spread_are_held(kind):
    rows = [
        np.zeros(256),
        np.full(256, 0.5),
        np.full(256, -0.5),
        np.eye(1, 256)[0],
        -np.eye(1, 256)[0],
    ]
    x = np.stack(rows).astype(F)
    found = unpacked(x, kind)
    assert np.isfinite(found).all()
    assert np.abs(found - x).max() < 0.01
    assert not found[0].any()


@pytest.mark.parametrize("kind", SIZES)
def test_the_size_is_that_of_the_format(kind):
    assert len(pack(blocks(), kind, "w")) == 8 * SIZES[kind]


@pytest.mark.parametrize(
    ("kind", "bound"),
    {
        "Q4_0": 0.09,
        "Q4_K": 0.073,
        "Q5_0": 0.045,
        "Q5_K": 0.037,
        "Q6_K": 0.0182,
        "Q8_0": 0.0056,
    }.items(),
)
def test_the_error_on_normal_weights_is_that_of_the_format(kind, bound):
    x = np.random.default_rng(1).standard_normal((256, 512)).astype(F)
    assert np.sqrt(np.mean((unpacked(x, T[kind]) - x) ** 2)) < bound


@pytest.mark.parametrize(("value", "kind"), [(np.nan, T.Q4_K), (np.inf, T.F32), (1e6, T.F16)])
def test_values_that_do_not_fit_are_refused_by_name(value, kind):
    x = np.full((1, 256), value, F)
    with pytest.raises(CheckpointError, match=r"blk\.0"):
        pack(x, kind, "blk.0.attn_q.weight")
