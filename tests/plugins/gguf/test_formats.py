"""The mixes give the counts of tensors that llama.cpp prints for models everyone has."""

import typing
from collections import Counter

import pytest
from gguf import GGMLQuantizationType

from surefoot.plugins.gguf.formats import FORMATS, LayerCounts, fitting, tensor_type
from surefoot.plugins.gguf.targets import GGUF
from surefoot.schema import settings

T = GGMLQuantizationType
# As `llama_model_loader` prints them for Llama 2 7B (32 layers, an output of its own) in the files
# of its quantizations on the hub.
LLAMA_7B = {
    "f16": {"F32": 65, "F16": 226},
    "q8_0": {"F32": 65, "Q8_0": 226},
    "q6_k": {"F32": 65, "Q6_K": 226},
    "q5_k_m": {"F32": 65, "Q5_K": 193, "Q6_K": 33},
    "q5_k_s": {"F32": 65, "Q5_K": 225, "Q6_K": 1},
    "q4_k_m": {"F32": 65, "Q4_K": 193, "Q6_K": 33},
    "q4_k_s": {"F32": 65, "Q4_K": 217, "Q5_K": 8, "Q6_K": 1},
    "q4_0": {"F32": 65, "Q4_0": 225, "Q6_K": 1},
}
LAYER = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


def tensors(layers):
    found = {"token_embd.weight": (8, 256), "output.weight": (8, 256), "output_norm.weight": (256,)}
    for i in range(layers):
        found |= {f"blk.{i}.{name}.weight": (8, 256) for name in LAYER}
        found |= {f"blk.{i}.{name}_norm.weight": (256,) for name in ("attn", "ffn")}
    return found


@pytest.mark.parametrize("name", LLAMA_7B)
def test_a_mix_has_the_types_of_llama_cpp(name):
    kinds = [tensor_type(n, s, FORMATS[name], LayerCounts(32)).name for n, s in tensors(32).items()]
    assert Counter(kinds) == LLAMA_7B[name]


def test_tied_embeddings_are_as_precise_as_an_output():
    tied = LayerCounts(32, is_tied=True)
    assert tensor_type("token_embd.weight", (8, 256), FORMATS["q4_k_m"], tied) == T.Q6_K
    assert tensor_type("token_embd.weight", (8, 32), FORMATS["q4_k_m"], tied) == T.Q8_0
    assert tensor_type("token_embd.weight", (8, 256), FORMATS["q8_0"], tied) == T.Q8_0


def test_experts_and_routers():
    experts = LayerCounts(8, num_experts=8)
    assert tensor_type("blk.4.ffn_gate_inp.weight", (8, 256), FORMATS["q4_k_m"], experts) == T.F32
    assert tensor_type("blk.4.attn_k.weight", (8, 256), FORMATS["q4_k_m"], experts) == T.Q8_0
    assert (
        tensor_type("blk.0.ffn_down_exps.weight", (8, 4, 256), FORMATS["q4_k_m"], experts) == T.Q6_K
    )
    assert (
        tensor_type("blk.1.ffn_down_exps.weight", (8, 4, 256), FORMATS["q4_k_m"], experts) == T.Q4_K
    )


@pytest.mark.parametrize(
    ("kind", "columns", "expected"),
    [
        (T.Q4_K, 512, T.Q4_K),
        (T.Q4_K, 96, T.Q5_0),
        (T.Q5_K, 96, T.Q5_1),
        (T.Q6_K, 96, T.Q8_0),
        (T.Q4_K, 90, T.F16),
        (T.Q8_0, 90, T.F16),
        (T.F32, 7, T.F32),
    ],
)
def test_rows_that_do_not_fit_fall_back_as_in_llama_cpp(kind, columns, expected):
    assert fitting(kind, columns) == expected


def test_the_command_knows_all_formats():
    assert set(typing.get_args(settings(GGUF)["quantize"].hint)) == set(FORMATS)
