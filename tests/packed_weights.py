"""Linear layers in the forms of GPTQ, AWQ and compressed-tensors, packed number by number as their
writers do, and the weights that they mean."""

import numpy as np
import torch

EVEN_FIRST = [0, 2, 4, 6, 1, 3, 5, 7]  # the outputs in a word of AWQ, from its lowest bits on


def pack(numbers, bits, order=None):
    """Rows of unsigned numbers [R, C] as 32-bit words [R, C * bits / 32]."""
    per_word = 32 // bits
    order = order or range(per_word)
    words = np.zeros((len(numbers), numbers.shape[1] // per_word), np.uint64)
    for word in range(words.shape[1]):
        for place, offset in enumerate(order):
            number = numbers[:, word * per_word + offset].numpy().astype(np.uint64)
            words[:, word] |= number << np.uint64(place * bits)
    return torch.from_numpy(words.astype(np.uint32).view(np.int32))


def drawn(outputs, inputs, groups, bits, seed, *, lowest_zero=1):
    """Numbers [O, I], zero points [O, G] and scales [O, G]."""
    random = torch.Generator().manual_seed(seed)
    top = 1 << bits
    q = torch.randint(0, top, (outputs, inputs), generator=random)
    zeros = torch.randint(lowest_zero, top, (outputs, groups), generator=random)
    scales = (torch.rand(outputs, groups, generator=random) + 0.5) / (8 * top)
    return q, zeros, scales.half()


def meant(q, zeros, scales, groups):
    """scale * (q - zero) in float64, number by number, rounded to float16."""
    found = torch.empty(q.shape, dtype=torch.float64)
    for column, group in enumerate(groups):
        exact = scales[:, group].double() * (q[:, column] - zeros[:, group]).double()
        found[:, column] = exact
    return found.half()


def gptq(outputs, inputs, *, bits=4, size=32, order=None, version="gptq", seed=0):
    """The tensors of one layer, and its weight. ``order`` gives each input its group."""
    size = inputs if size == -1 else size
    groups = [i // size for i in range(inputs)] if order is None else list(order)
    q, zeros, scales = drawn(outputs, inputs, max(groups) + 1, bits, seed)
    stored = zeros - 1 if version == "gptq" else zeros
    tensors = {
        "qweight": pack(q, bits).T.contiguous(),
        "qzeros": pack(stored.T, bits),
        "scales": scales.T.contiguous(),
        "g_idx": torch.tensor(groups, dtype=torch.int32),
    }
    return tensors, meant(q, zeros, scales, groups)


def awq(outputs, inputs, *, size=16, seed=0):
    size = inputs if size == -1 else size
    groups = [i // size for i in range(inputs)]
    q, zeros, scales = drawn(outputs, inputs, inputs // size, 4, seed, lowest_zero=0)
    tensors = {
        "qweight": pack(q.T, 4, EVEN_FIRST),
        "qzeros": pack(zeros.T, 4, EVEN_FIRST),
        "scales": scales.T.contiguous(),
    }
    return tensors, meant(q, zeros, scales, groups)


def packed_integers(outputs, inputs, *, bits=4, size=16, order=None, symmetric=False, seed=0):
    """compressed-tensors' pack-quantized: numbers and zero points raised by half of their range."""
    size = inputs if size == -1 else size
    groups = [i // size for i in range(inputs)] if order is None else list(order)
    q, zeros, scales = drawn(outputs, inputs, max(groups) + 1, bits, seed, lowest_zero=0)
    if symmetric:
        zeros = torch.full_like(zeros, 1 << (bits - 1))
    tensors = {
        "weight_packed": pack(q, bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor([outputs, inputs]),
    }
    if not symmetric:
        tensors["weight_zero_point"] = pack(zeros.T, bits).T.contiguous()
    if order is not None:
        tensors["weight_g_idx"] = torch.tensor(groups, dtype=torch.int32)
    return tensors, meant(q, zeros, scales, groups)
