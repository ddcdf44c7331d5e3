"""What overflows, or what transformers keeps in float32, is kept or refused by every cast."""

import ast

import pytest
import torch
import transformers
from safetensors.torch import load_file

import mixtures
from folders import edit_json, save_adapter, save_model, tokenizer
from source_trees import SRC, TREES
from surefoot.checkpoint.converting.targets import HuggingFaceModel
from surefoot.checkpoint.float32_weights import kept_in_float32
from surefoot.checkpoint.sources import CastSource, TensorsInMemory, copy, read_whole
from surefoot.errors import CheckpointError
from surefoot.parallel.sharding import Box
from surefoot.use import export
from zoo import architectures

ROOMS = ("checkpoint", "use/exporting", "plugins/gguf", "plugins/quantize", "plugins/mindspore")
CASTING = {"to", "half", "bfloat16", "type", "type_as", "astype"}
ALLOWED = {  # by file: calls that write no weight of another range, or are the one that checks
    "checkpoint/sources.py": {"values.to(dtype)"},  # ``rounded``
    "checkpoint/layouts/adapter_merge.py": {
        # to float32 or float64, in which a merge is computed
        "self.adapter.read(bias, box).to(exact)",
        "self._plain(name, box).to(exact)",
        "read_whole(self.adapter, name).to(exact)",
        "self.adapter.read(delta.magnitude, outs).to(exact)",
        "total.sqrt().to(exact)",
    },
    "checkpoint/looking/diff.py": {"parts.reshape(-1).to(torch.float64)"},
    "checkpoint/state/states.py": {  # words of a generator of random numbers
        "numpy['state']['key'].astype(np.int64)",
        "words['key'].numpy().astype(np.uint32)",
    },
    "use/exporting/verification.py": {
        "collate([item], packing=False).to(device())",
        "head[0].to(states_TD.device)",
        "loader.from_pretrained(folder, **options).to(device())",
    },
    "plugins/gguf/architectures.py": {
        "(1 / ((1 - smooth) / factor + smooth)).astype(np.float32)",
    },
    "plugins/gguf/formats.py": {  # of blocks, whose values ``pack`` has compared with float16
        "(largest / np.float32(63)).astype(np.float16)",
        "d_N.astype(np.float32)",
        "dmin_N.astype(np.float32)",
        "inverse.astype(np.float32)",
        "np.minimum(np.rint(inverse_N[:, None] * scales_NG), 127).astype(np.int8)",
        "np.where(is_zero, np.float32(0), 1 / inverse_N).astype(np.float16)",
        "np.where(step == 0, levels.reshape(x_NGS.shape), again).astype(np.uint8)",
        "np.where(step == 0, levels_NGS, again).astype(np.uint8)",
        "steps.astype(np.uint8)",
        "steps_NG[..., None].astype(np.float32)",
        "values_N.astype('<f2')",
    },
    "plugins/quantize/calibration.py": {
        "matrix.weight.to(matrix.dtype)",  # and compared with infinity in the next line
        "np.linspace(0, len(data) - 1, min(count, len(data))).astype(int)",
    },
    "plugins/quantize/layerwise.py": {  # of a model that is computed with, and not written
        "buffer.to(device())",
        "matrix.to(device())",
        "read_whole(self.source, self.names[name]).to(device(), torch.float32)",
        "values.to(module.get_buffer(name).dtype)",
    },
}


def casts(tree):
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    named = (call for call in calls if isinstance(call.func, ast.Attribute))
    return {ast.unparse(call) for call in named if call.func.attr in CASTING and call.args}


def test_every_cast_of_a_weight_goes_through_one_function():
    files = {str(file.relative_to(SRC)): tree for file, tree in TREES.items()}
    walked = {name: casts(tree) for name, tree in files.items() if name.startswith(ROOMS)}
    found = {name: calls for name, calls in walked.items() if calls}
    assert len(walked) > 60
    extra = {n: calls - ALLOWED.get(n, set()) for n, calls in found.items()}
    assert not {n: calls for n, calls in extra.items() if calls}
    gone = {n: calls - found.get(n, set()) for n, calls in ALLOWED.items()}
    assert not {n: calls for n, calls in gone.items() if calls}


def test_a_new_cast_would_be_found():
    planted = "def read(self, name):\n    return self.source.read(name).to(self.dtype)"
    assert casts(ast.parse(planted)) == {"self.source.read(name).to(self.dtype)"}


BEYOND = {  # a finite value, and the type that has none so large
    "float32 to float16": (torch.tensor([1.0, 1e5]), torch.float16),
    "bfloat16 to float16": (torch.tensor([7e4], dtype=torch.bfloat16), torch.float16),
    "float32 to bfloat16": (torch.tensor([3.4e38]), torch.bfloat16),
    "float64 to float32": (torch.tensor([1e39], dtype=torch.float64), torch.float32),
}


@pytest.mark.parametrize("case", BEYOND)
def test_a_value_beyond_a_type_is_refused_by_its_name(case):
    values, dtype = BEYOND[case]
    source = CastSource(TensorsInMemory({"layers.0.w": values}), dtype)
    with pytest.raises(CheckpointError, match=r"layers\.0\.w: its values \(up to .*\) exceed"):
        source.read("layers.0.w", Box.whole(tuple(values.shape)))


def test_infinity_and_what_rounds_to_the_largest_value_pass():
    values = torch.tensor([float("inf"), 65519.0, float("nan")])
    written = read_whole(CastSource(TensorsInMemory({"w": values}), torch.float16), "w")
    assert written[:2].tolist() == [float("inf"), 65504.0]
    assert written[2].isnan()


def test_a_copy_that_would_overflow_leaves_nothing(tmp_path):
    with pytest.raises(CheckpointError, match="exceed float16"):
        copy(TensorsInMemory({"w": torch.tensor([1e5])}), tmp_path / "out", dtype="float16")
    assert not any((tmp_path / "out").iterdir())


def test_the_merge_of_a_half_precision_base_is_refused_and_the_cure_works(tmp_path):
    base = save_model(tmp_path / "base", dtype=torch.float16)
    save_adapter(base, tmp_path / "adapter", target_modules=["q_proj"])
    edit_json(tmp_path / "adapter" / "adapter_config.json", lora_alpha=1e7)
    with pytest.raises(CheckpointError, match=r"q_proj.*exceed float16; write bfloat16"):
        export(tmp_path / "adapter", tmp_path / "out")
    export(tmp_path / "adapter", tmp_path / "cured", HuggingFaceModel(dtype="bfloat16"))
    written = load_file(tmp_path / "cured" / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in written.values())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", ["deepseek_v3", "gpt_oss", "nemotron_h"])
def test_what_transformers_keeps_in_float32_is_written_as_it_is(kind, dtype, tmp_path):
    known = tokenizer()
    sizes = {"vocab_size": len(known), "eos_token_id": known.eos_token_id}
    mixtures.model(kind, **sizes).save_pretrained(tmp_path / "base")
    known.save_pretrained(tmp_path / "base")
    out = export(tmp_path / "base", tmp_path / "out", HuggingFaceModel(dtype=dtype))
    before, written = (load_file(f / "model.safetensors") for f in (tmp_path / "base", out))
    opened = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=dtype)
    kept = {name for name, tensor in opened.state_dict().items() if tensor.dtype == torch.float32}
    stored = {name for name, tensor in written.items() if tensor.dtype == torch.float32}
    # of Nemotron, files say backbone where modules say model
    assert {n.partition(".")[2] for n in kept} == {n.partition(".")[2] for n in stored}
    assert all(torch.equal(before[name], written[name]) for name in stored)
    assert bool(stored) == ((kind, dtype) != ("gpt_oss", "bfloat16"))


def test_the_names_of_every_architecture_are_understood(tmp_path):
    count = 0
    for kind in sorted({name.partition(":")[0] for name in architectures.SETTINGS}):
        config_class = transformers.CONFIG_MAPPING[kind]
        model_class = transformers.MODEL_MAPPING[config_class]
        if names := getattr(model_class, "_keep_in_fp32_modules_strict", None):
            (tmp_path / "config.json").write_text(f'{{"model_type": "{kind}"}}')
            kept = kept_in_float32(tmp_path, "bfloat16")
            assert all(kept(f"model.layers.0.{n.replace('*', 'x')}.weight") for n in names)
            assert not kept("model.layers.0.self_attn.q_proj.bias")
            count += 1
    assert count >= 6
