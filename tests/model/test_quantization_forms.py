"""Quantized weights in files: computed as what they mean, or refused with the tensor's name."""

import pytest
import torch

import packed_weights
from surefoot.errors import ModelError
from surefoot.model._quantization import FORMS, unpack

OUT, IN = 16, 64
REVERSED = [g for g in (3, 2, 1, 0) for _ in range(16)]
SCATTERED = [i * 7 % 4 for i in range(IN)]
GROUPED = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16}


def one(method, settings, tensors):
    """The weight of the only module, in the form ``method``."""
    form = FORMS[method].of({"quant_method": method, **settings})
    stored = {f"m.{role}": tensor for role, tensor in tensors.items()}
    kinds = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in stored.items()}
    ((name, weight),) = form.weights(kinds, stored.__getitem__).items()
    assert name == "m.weight"
    found = weight.compute({role: stored[part] for role, part in weight.parts.items()})
    assert tuple(found.shape) == weight.shape
    return found


def compressed(weights=GROUPED, form="pack-quantized", **more):
    return {"format": form, "config_groups": {"group_0": {"weights": weights}}, **more}


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_gptq_means_what_its_writer_packed(bits, version):
    tensors, expected = packed_weights.gptq(OUT, IN, bits=bits, size=16, version=version)
    settings = {"bits": bits, "group_size": 16, "checkpoint_format": version}
    assert torch.equal(one("gptq", settings, tensors), expected)
    tensors.pop("g_idx")
    assert torch.equal(one("gptq", settings, tensors), expected)


@pytest.mark.parametrize("size", [-1, 48], ids=["one group", "a last group that is smaller"])
def test_groups_of_gptq_may_be_of_any_size(size):
    tensors, expected = packed_weights.gptq(OUT, IN, size=size)
    assert torch.equal(one("gptq", {"bits": 4, "group_size": size}, tensors), expected)


@pytest.mark.parametrize("order", [REVERSED, SCATTERED], ids=["reversed", "scattered"])
def test_act_order_puts_inputs_into_other_groups(order):
    tensors, expected = packed_weights.gptq(OUT, IN, size=16, order=order)
    settings = {"bits": 4, "group_size": 16, "desc_act": True}
    assert torch.equal(one("gptq", settings, tensors), expected)
    with pytest.raises(ModelError, match=r"m\.g_idx puts inputs into other groups than .*desc_act"):
        one("gptq", {**settings, "desc_act": False}, tensors)
    tensors.pop("g_idx")
    with pytest.raises(ModelError, match=r"m\.g_idx is missing"):
        one("gptq", settings, tensors)


def test_the_two_versions_of_gptq_are_a_scale_apart():
    """Taken for the other one, every weight would be wrong by its scale."""
    tensors, expected = packed_weights.gptq(OUT, IN, size=-1, version="gptq_v2")
    usual = {"bits": 4, "group_size": -1}
    if (unpack(tensors["qzeros"], 4, 1) == 15).any():
        tensors["qzeros"].fill_(0x77777777)
        expected = one("gptq", {**usual, "checkpoint_format": "gptq_v2"}, tensors)
    found = one("gptq", usual, tensors).float()
    assert torch.allclose(found + tensors["scales"].T.float(), expected.float(), atol=1e-4)


def test_a_zero_point_that_gptq_does_not_represent_is_refused():
    tensors, _ = packed_weights.gptq(OUT, IN, size=16)
    tensors["qzeros"][1, 0] |= 15
    settings = {"bits": 4, "group_size": 16}
    with pytest.raises(ModelError, match=r"m\.qzeros has a zero point of 0 or 16"):
        one("gptq", settings, tensors)
    one("gptq", {**settings, "checkpoint_format": "gptq_v2"}, tensors)


@pytest.mark.parametrize("size", [16, -1])
def test_awq_means_what_its_writer_packed(size):
    tensors, expected = packed_weights.awq(OUT, IN, size=size)
    assert torch.equal(one("awq", {"bits": 4, "group_size": size}, tensors), expected)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("size", [16, -1])
def test_packed_integers_mean_what_their_writer_packed(bits, symmetric, size):
    tensors, expected = packed_weights.packed_integers(
        32, IN, bits=bits, size=size, symmetric=symmetric
    )
    strategy = "channel" if size == -1 else "group"
    weights = {**GROUPED, "num_bits": bits, "group_size": size, "strategy": strategy}
    assert torch.equal(one("compressed-tensors", compressed(weights), tensors), expected)


def test_an_order_of_inputs_is_read_and_must_be_there():
    tensors, expected = packed_weights.packed_integers(OUT, IN, order=SCATTERED)
    settings = compressed({**GROUPED, "actorder": "group"})
    assert torch.equal(one("compressed-tensors", settings, tensors), expected)
    tensors.pop("weight_g_idx")
    with pytest.raises(ModelError, match=r"m\.weight_packed .* fits none of"):
        one("compressed-tensors", settings, tensors)


def of_strategy(strategy, found):
    """Scales or zero points of a matrix of 24 x 40, spread over it."""
    if strategy == "block":  # 16 x 32: the last ones are cut short
        return found.repeat_interleave(16, 0)[:24].repeat_interleave(32, 1)[:, :40]
    return found.repeat_interleave(8, 1) if strategy == "group" else found.reshape(-1, 1)


SHAPES = {"tensor": (1,), "channel": (24, 1), "group": (24, 5), "block": (2, 2)}


@pytest.mark.parametrize("strategy", SHAPES)
@pytest.mark.parametrize("kind", ["float", "int"])
def test_unpacked_numbers_of_each_strategy(strategy, kind):
    random = torch.Generator().manual_seed(0)
    scales = torch.rand(SHAPES[strategy], generator=random).bfloat16() / 100
    numbers = torch.randn(24, 40, generator=random) * 50
    stored = numbers.to(torch.float8_e4m3fn if kind == "float" else torch.int8)
    tensors = {"weight": stored, "weight_scale": scales, "input_scale": torch.ones(1)}
    expected = stored.double()
    if kind == "int":
        zeros = torch.randint(-9, 9, SHAPES[strategy], generator=random, dtype=torch.int8)
        tensors["weight_zero_point"] = zeros
        expected = expected - of_strategy(strategy, zeros).double()
    expected = (expected * of_strategy(strategy, scales).double()).bfloat16()
    weights = {"num_bits": 8, "type": kind, "strategy": strategy, "symmetric": kind == "float"}
    weights |= {"group_size": 8} if strategy == "group" else {}
    weights |= {"block_structure": [16, 32]} if strategy == "block" else {}
    settings = compressed(weights, f"{kind}-quantized")
    assert torch.equal(one("compressed-tensors", settings, tensors), expected)


def test_of_several_groups_the_one_that_fits_is_taken():
    tensors, expected = packed_weights.packed_integers(OUT, IN, bits=8, size=16)
    groups = {"a": {"weights": GROUPED}, "b": {"weights": {**GROUPED, "num_bits": 8}}}
    settings = {"format": "pack-quantized", "config_groups": groups}
    assert torch.equal(one("compressed-tensors", settings, tensors), expected)
    groups["c"] = {"weights": {**GROUPED, "group_size": 32}}  # of twice as many numbers
    assert torch.equal(one("compressed-tensors", settings, tensors), expected)
    tensors.pop("weight_shape")
    with pytest.raises(ModelError, match=r"scales \[16, 4\]\) fits several of"):
        one("compressed-tensors", settings, tensors)


REFUSED = {
    "gptq": [
        ({"bits": 3}, r"bits is 3; supported: 2, 4, 8"),
        ({}, r"bits is None"),
        ({"bits": 4, "checkpoint_format": "marlin"}, r"checkpoint_format is 'marlin'"),
        ({"bits": 4, "group_size": 0}, r"group_size is 0"),
        ({"bits": 4, "dynamic": {"+:.*q_proj": {"bits": 8}}}, r"dynamic has settings .*q_proj"),
        ({"bits": 4, "dynamic": 7}, r"dynamic is 7; expected settings"),
    ],
    "awq": [
        ({"version": "gemv"}, r"version is 'gemv'; supported: 'gemm'"),
        ({"bits": 8}, r"bits is 8; supported: 4"),
        ({"zero_point": False}, r"zero_point is False; supported: True"),
        ({"backend": "llm-awq"}, r"backend is 'llm-awq'"),
    ],
    "compressed-tensors": [
        (compressed(form="nvfp4-pack-quantized"), r"group_0 is 'nvfp4-pack-quantized'; supported"),
        (compressed(form="dense"), r"group_0 is 'dense'"),
        (compressed({**GROUPED, "num_bits": 3}), r"num_bits is 3; supported: 2, 4, 8"),
        (compressed({**GROUPED, "strategy": "tensor_group"}), r"strategy is 'tensor_group'"),
        (compressed({**GROUPED, "group_size": None}), r"strategy group with group_size None"),
        (compressed(sparsity_config={"format": "sparse-24-bitmask"}), r"sparsity_config.format"),
        (compressed(transform_config={"config_groups": {"R1": {}}}), r"inputs of layers are rotat"),
        ({"config_groups": {"W8A8": ["Linear"]}}, r"W8A8 is \['Linear'\]; expected settings"),
    ],
}


@pytest.mark.parametrize(
    ("method", "settings", "words"),
    [(method, *case) for method, cases in REFUSED.items() for case in cases],
)
def test_what_is_not_read_is_refused_by_its_setting(method, settings, words):
    with pytest.raises(ModelError, match=words):
        FORMS[method].of(settings)


def cut(tensors, role):
    tensors[role] = tensors[role][:-1]


def test_parts_of_another_shape_or_type_are_refused():
    settings = {"bits": 4, "group_size": 16}
    for role in ("scales", "qzeros", "g_idx"):
        tensors, _ = packed_weights.gptq(OUT, IN, size=16)
        cut(tensors, role)
        with pytest.raises(ModelError, match=rf"m\.{role} is .*, expected .* by quantization_con"):
            one("gptq", settings, tensors)
    tensors, _ = packed_weights.gptq(OUT, IN, size=32)
    with pytest.raises(ModelError, match=r"m\.qzeros is int32 \[2, 2\], expected int32 \[4, 2\]"):
        one("gptq", settings, tensors)
    tensors, _ = packed_weights.awq(OUT, IN)
    with pytest.raises(ModelError, match=r"m has 64 inputs, which groups of 48 do not divide"):
        one("awq", {"group_size": 48}, tensors)
    tensors.pop("qzeros")
    with pytest.raises(ModelError, match=r"m\.qzeros is missing, a part of the quantized weight"):
        one("awq", {"group_size": 16}, tensors)
    tensors, _ = packed_weights.packed_integers(OUT, IN)
    tensors["weight_shape"][1] = IN - 9
    with pytest.raises(ModelError, match=r"m\.weight_packed .* fits none of"):
        one("compressed-tensors", compressed(), tensors)
    tensors, _ = packed_weights.packed_integers(OUT, IN)
    cut(tensors, "weight_zero_point")
    with pytest.raises(ModelError, match=r"zero_point is \[1, 4\], expected \[2, 4\] for its"):
        one("compressed-tensors", compressed(), tensors)
    plain = {"weight": torch.zeros(OUT, IN), "weight_scale": torch.zeros(OUT, 4)}
    with pytest.raises(ModelError, match=r"m\.weight \(float32 .* fits none of"):
        one("compressed-tensors", compressed(), plain)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("strategy", ["tensor", "channel", "group", "block"])
@pytest.mark.parametrize("form", ["pack-quantized", "int-quantized", "float-quantized"])
def test_the_package_computes_the_same(form, strategy, symmetric, bits):
    compressors = pytest.importorskip("compressed_tensors.compressors")
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    is_packed, is_float = form == "pack-quantized", form == "float-quantized"
    if (is_packed and strategy in ("tensor", "block")) or (bits != 8 and not is_packed):
        pytest.skip("not written by the package")
    if is_float and not symmetric:
        pytest.skip("floats have no zero points")
    weights = {"num_bits": bits, "type": "float" if is_float else "int", "strategy": strategy}
    weights |= {"symmetric": symmetric, "group_size": 8 if strategy == "group" else None}
    weights |= {"block_structure": [16, 32] if strategy == "block" else None}
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    random = torch.Generator().manual_seed(0)
    rows, columns = (33, 40) if is_packed else (24, 40)  # that do not fill words
    sizes = {"tensor": (1,), "channel": (rows, 1), "group": (rows, columns // 8), "block": (2, 2)}
    weight = torch.randn(rows, columns, generator=random).bfloat16()
    scale = (torch.rand(sizes[strategy], generator=random) / 20 + 0.01).bfloat16()
    state = {"weight": weight, "weight_scale": scale}
    if not symmetric:
        low = -(1 << (bits - 1))
        zeros = torch.randint(low, -low, scale.shape, generator=random, dtype=torch.int8)
        state["weight_zero_point"] = zeros
    compressor = compressors.BaseCompressor.get_value_from_registry(form)
    stored = compressor.compress(state, scheme)
    expected = compressor.decompress(stored, scheme)["weight"]
    settings = compressed({k: v for k, v in weights.items() if v is not None}, form)
    assert torch.equal(one("compressed-tensors", settings, stored), expected)
