"""An adapter as a GGUF file is, on a GGUF of its base, the merged model."""

import numpy as np
import pytest
from gguf import GGUFReader

from each import some
from surefoot.errors import ModelError
from surefoot.plugins.gguf.targets import GGUF, GGUFAdapter
from surefoot.use import export

from ..gguf.test_model_file import fields, save, save_adapter, values

SETTINGS = {
    "llama": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 3}},
    "qwen2": {"use_rslora": True, "lora_alpha": 7},
    "phi3": {},
}


def applied(base, adapter, alpha):
    """As llama.cpp applies it: W + alpha / r B A."""
    found = dict(base)
    for name in {n.rpartition(".")[0] for n in adapter}:
        a, b = adapter[f"{name}.lora_a"], adapter[f"{name}.lora_b"]
        found[name] = base[name] + alpha / len(a) * (b @ a)
    return found


@pytest.mark.parametrize("kind", some(SETTINGS, ["qwen2"]))
def test_it_gives_the_merged_weights(kind, tmp_path):
    base = save(tmp_path / "base", kind)
    whole = values(export(base, tmp_path / "base.gguf", GGUF(quantize="f32")))
    save_adapter(base, tmp_path / "adapter", **SETTINGS[kind])
    merged = values(export(tmp_path / "adapter", tmp_path / "merged.gguf", GGUF(quantize="f32")))
    out = tmp_path / "adapter.gguf"
    export(tmp_path / "adapter", out, GGUFAdapter(quantize="f32"))
    said, adapter = fields(out), values(out)
    assert (said["general.type"], said["adapter.type"]) == ("adapter", "lora")
    found = applied(whole, adapter, said["adapter.lora.alpha"])
    assert found.keys() == merged.keys()
    adapted = "blk.0.attn_output.weight"
    assert not np.allclose(merged[adapted], whole[adapted])
    for name, value in merged.items():
        np.testing.assert_allclose(found[name], value, atol=1e-6)


def test_the_modelfile_names_base_and_adapter(tmp_path):
    base = save(tmp_path / "base")
    save_adapter(base, tmp_path / "adapter")
    export(tmp_path / "adapter", tmp_path / "a.gguf", GGUFAdapter(quantize="f16"))
    lines = (tmp_path / "a.Modelfile").read_text().splitlines()
    assert lines[2:4] == [f"FROM {base}", "ADAPTER ./a.gguf"]
    kinds = {t.tensor_type.name for t in GGUFReader(tmp_path / "a.gguf").tensors}
    assert kinds == {"F16"}


@pytest.mark.parametrize(
    ("settings", "quantize", "said"),
    [
        ({"use_dora": True}, "f16", "DoRA"),
        ({"modules_to_save": ["lm_head"]}, "f16", "modules_to_save"),
        ({"target_modules": ["embed_tokens"]}, "f16", "embed"),
        ({}, "q4_k_m", "f32, f16, bf16, q8_0"),
    ],
)
def test_what_the_format_has_not_is_refused(settings, quantize, said, tmp_path):
    base = save(tmp_path / "base")
    save_adapter(base, tmp_path / "adapter", **settings)
    with pytest.raises(ModelError, match=said):
        export(tmp_path / "adapter", tmp_path / "a.gguf", GGUFAdapter(quantize=quantize))
    with pytest.raises(ModelError, match="is no adapter"):
        export(base, tmp_path / "a.gguf", GGUFAdapter(quantize="f16"))
