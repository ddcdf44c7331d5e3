"""transformers' own GGUF loader opens every architecture, and computes the same logits."""

import errno
import json

import numpy as np
import pytest
import torch
from gguf import GGUFReader, quants
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import tiny
import tiny_tokenizers
from each import some
from folders import CHATML, edit_json, save_adapter
from surefoot.errors import CheckpointError, ModelError
from surefoot.plugins.gguf.targets import GGUF
from surefoot.storage import files
from surefoot.use import export
from surefoot.use.exporting.verification import verify_export

KINDS = {
    "llama": {"attention_bias": True},
    "mistral": {"sliding_window": None},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "qwen3_moe": {"norm_topk_prob": True},
    "gemma2": {"query_pre_attn_scalar": 8, "sliding_window": 64},
    "gemma3": {"query_pre_attn_scalar": 8, "sliding_window": 64, "num_hidden_layers": 6},
    "phi3": {"original_max_position_embeddings": 128, "pad_token_id": 2},
}
TEXTS = [
    "Hello, world! 12345 é 你好 🙂",
    "<|im_start|>user\n  a\n\n\tb<|im_end|>\n",
    "I'll  'RE x+1",
]
IDS = torch.arange(40, 90)[None]
tiny.MORE["gemma3"] = {"model_type": "gemma3_text"}
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*(Token|torch_dtype|deprecated).*"),
]


def save(folder, kind="llama", *, tokens="qwen", padding=5, template=CHATML, **changes):
    """A model whose norms and biases are not those of a new one."""
    known = tiny_tokenizers.tokenizer(tokens, chat_template=template)
    sizes = {"vocab_size": len(known) + padding, "hidden_size": 64, "intermediate_size": 64}
    made = tiny.model(kind, **{**sizes, **KINDS.get(kind, {}), **changes})
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim == 1:
                parameter += 0.1 * torch.randn_like(parameter)
    made.save_pretrained(folder)
    known.save_pretrained(folder)
    return folder


@torch.no_grad()
def logits(folder, name=None, ids=IDS, config=None):
    """With ``name``, of a GGUF file, whose loader knows some settings from the config only."""
    extra = {"gguf_file": name} if name else {}
    extra |= {"config": AutoConfig.from_pretrained(config)} if config else {}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **extra)
    return model.eval()(ids).logits


def fields(path):
    return {name: field.contents() for name, field in GGUFReader(path).fields.items()}


def values(path):
    return {t.name: quants.dequantize(t.data, t.tensor_type) for t in GGUFReader(path).tensors}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Makes each model once."""
    root, made = tmp_path_factory.mktemp("models"), {}

    def model(kind):
        made.setdefault(kind, root / kind)
        return made[kind] if made[kind].exists() else save(made[kind], kind)

    return model


@pytest.mark.parametrize("kind", some(KINDS, ["llama", "qwen2", "gemma3", "qwen3_moe"]))
def test_a_file_in_float32_gives_the_same_logits(models, kind, tmp_path):
    folder = models(kind)
    export(folder, tmp_path / "out.gguf", GGUF(quantize="f32"))
    config = None if kind == "mistral" else folder  # it knows mistral as llama only
    found = logits(tmp_path, "out.gguf", config=config)
    assert torch.equal(found, logits(folder))


@pytest.mark.parametrize(
    ("quantize", "bound"), [("f16", 5e-3), ("bf16", 0.05), ("q8_0", 0.06), ("q4_k_m", 0.5)]
)
def test_other_formats_are_as_near_as_they_can_be(models, quantize, bound, tmp_path):
    folder = models("qwen3")
    export(folder, tmp_path / "out.gguf", GGUF(quantize=quantize))
    expected = logits(folder)
    found = logits(tmp_path, "out.gguf", config=folder)
    assert 0 < (found - expected).abs().max() < bound * expected.std()


def test_k_quants_are_read_back(tmp_path):
    folder = save(
        tmp_path / "wide", "qwen2", hidden_size=256, intermediate_size=256, num_hidden_layers=2
    )
    export(folder, tmp_path / "out.gguf", GGUF(quantize="q4_k_m"))
    kinds = {t.name: t.tensor_type.name for t in GGUFReader(tmp_path / "out.gguf").tensors}
    assert kinds["token_embd.weight"] == "Q6_K"
    assert {kinds["blk.0.attn_q.weight"], kinds["blk.1.ffn_down.weight"]} == {"Q4_K", "Q6_K"}
    expected = logits(folder)
    found = logits(tmp_path, "out.gguf", config=folder)
    assert (found - expected).std() < 0.2 * expected.std()


@pytest.mark.parametrize("kind", ["qwen", "llama3", "gpt2"])
def test_the_tokenizer_of_the_file_makes_the_same_ids(kind, tmp_path):
    folder = save(tmp_path / "model", "qwen2" if kind == "qwen" else "llama", tokens=kind)
    export(folder, tmp_path / "out.gguf", GGUF(quantize="f16"))
    own, found = AutoTokenizer.from_pretrained(folder), fields(tmp_path / "out.gguf")
    read = AutoTokenizer.from_pretrained(tmp_path, gguf_file="out.gguf")
    for text in TEXTS:
        ids = own(text, add_special_tokens=False)["input_ids"]
        assert read(text, add_special_tokens=False)["input_ids"] == ids
    tokens, kinds = found["tokenizer.ggml.tokens"], found["tokenizer.ggml.token_type"]
    rest = range(len(own), len(tokens))
    assert rest
    assert tokens[len(own) :] == [f"[PAD{i}]" for i in rest]
    assert kinds[len(own) :] == [5] * len(rest)  # unused
    assert kinds[own.convert_tokens_to_ids("<|im_end|>")] == 3  # control
    assert found["tokenizer.ggml.eos_token_id"] == own.eos_token_id
    assert found["tokenizer.ggml.eot_token_id"] == own.convert_tokens_to_ids("<|im_end|>")
    assert found["tokenizer.ggml.pre"] == ("gpt-2" if kind == "gpt2" else "qwen2")


def test_a_first_token_that_the_template_does_not_write_is_not_added(tmp_path):
    for template, expected in [(CHATML, False), ("{{ bos_token }}" + CHATML, True), (None, True)]:
        folder = save(
            tmp_path / f"model{expected}{template is None}", tokens="llama3", template=template
        )
        out = export(folder, folder / "out.gguf", GGUF(quantize="f16"))
        assert fields(out)["tokenizer.ggml.add_bos_token"] is expected


def test_the_template_is_written_without_marks_and_writes_the_same(tmp_path):
    folder = save(tmp_path / "model")
    template = fields(export(folder, tmp_path / "out.gguf", GGUF(quantize="f16")))[
        "tokenizer.chat_template"
    ]
    assert "generation %}" not in template
    turns = [{"role": r, "content": f" {r}\n"} for r in ("system", "user", "assistant", "user")]
    own = AutoTokenizer.from_pretrained(folder)
    expected = own.apply_chat_template(turns, tokenize=False)
    assert own.apply_chat_template(turns, chat_template=template, tokenize=False) == expected


@pytest.mark.parametrize(
    "saved",
    [
        pytest.param(None, marks=pytest.mark.proof),
        ["embed_tokens", "lm_head"],
        pytest.param(["embed_tokens"], marks=pytest.mark.proof),
    ],
)
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
def test_an_adapter_is_merged_and_new_tokens_are_in_the_file(tmp_path, saved):
    base = save(tmp_path / "base", "qwen2")
    save_adapter(base, tmp_path / "adapter", modules_to_save=saved)
    merged = export(tmp_path / "adapter", tmp_path / "merged")
    out = export(tmp_path / "adapter", tmp_path / "out.gguf", GGUF(quantize="f32"))
    assert torch.equal(logits(tmp_path, "out.gguf", config=merged), logits(merged))
    assert ("output.weight" in values(out)) == (saved is not None)


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}


def test_rotations_of_llama_3_are_divided_as_transformers_does(tmp_path):
    rope = {**LLAMA3, "rope_theta": 10000.0, "original_max_position_embeddings": 32}
    folder = save(tmp_path / "model", rope_parameters=rope, head_dim=16)
    found = values(export(folder, tmp_path / "out.gguf", GGUF(quantize="f32")))["rope_freqs.weight"]
    config = AutoConfig.from_pretrained(folder)
    expected = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0].numpy()
    plain = 1 / 10000.0 ** (np.arange(0, 16, 2) / 16)
    assert len(set(found.round(3))) > 2
    np.testing.assert_allclose(plain / found, expected, rtol=1e-5)


@pytest.mark.parametrize("kind", ["yarn", "linear"])
def test_scaled_rotations_are_settings(tmp_path, kind):
    rope = {
        "rope_type": kind,
        "factor": 4.0,
        "rope_theta": 5000.0,
        "original_max_position_embeddings": 32,
    }
    found = fields(
        export(
            save(tmp_path / "m", "qwen3", rope_parameters=rope),
            tmp_path / "o.gguf",
            GGUF(quantize="f32"),
        )
    )
    assert found["qwen3.rope.scaling.type"] == kind
    assert found["qwen3.rope.scaling.factor"] == 4.0
    assert found["qwen3.rope.freq_base"] == 5000.0
    if kind == "yarn":
        assert found["qwen3.rope.scaling.original_context_length"] == 32


def test_long_and_short_factors_are_tensors(tmp_path):
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "long_factor": [2.0] * 8,
        "short_factor": [1.0] * 8,
        "original_max_position_embeddings": 32,
    }
    sizes = {"head_dim": 16, "original_max_position_embeddings": 32}
    folder = save(tmp_path / "m", "phi3", rope_parameters=rope, **sizes)
    out = export(folder, tmp_path / "o.gguf", GGUF(quantize="f16"))
    assert values(out)["rope_factors_long.weight"].tolist() == [2.0] * 8
    found = fields(out)
    assert found["phi3.rope.scaling.original_context_length"] == 32
    expected = ROPE_INIT_FUNCTIONS["longrope"](AutoConfig.from_pretrained(folder), "cpu")[1]
    assert found["phi3.rope.scaling.attn_factor"] == pytest.approx(expected)


def test_sliding_windows_of_gemma_are_settings(models, tmp_path):
    found = fields(export(models("gemma3"), tmp_path / "o.gguf", GGUF(quantize="f16")))
    assert found["gemma3.attention.sliding_window"] == 64
    assert found["gemma3.rope.freq_base_swa"] == 10000.0
    assert found["gemma3.rope.freq_base"] == 1000000.0


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("olmo2", {}, "model_type olmo2"),
        ("llama", {"hidden_act": "gelu"}, "activation silu"),
        ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob"),
        ("gemma2", {"query_pre_attn_scalar": 99}, "query_pre_attn_scalar"),
        ("gemma2", {"layer_types": ["full_attention"] * 3}, "layer_types"),
        ("qwen3", {"attention_bias": True}, "_proj.bias has no place"),
        (
            "qwen3",
            {
                "rope_parameters": {
                    **LLAMA3,
                    "rope_theta": 1e4,
                    "original_max_position_embeddings": 8,
                }
            },
            "no rope_type llama3",
        ),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "has no place"),
        ("qwen3", {"rope_parameters": {**YARN, "attention_factor": 2.0}}, "attention_factor"),
    ],
)
def test_what_llama_cpp_would_compute_otherwise_is_refused(tmp_path, kind, changes, said):
    folder = save(tmp_path / "model", kind, **changes)
    with pytest.raises((ModelError, CheckpointError), match=said):
        export(folder, tmp_path / "out.gguf", GGUF(quantize="f16"))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_window_that_llama_cpp_ignores_is_said(tmp_path, caplog):
    folder = save(tmp_path / "model", "mistral", sliding_window=16)
    export(folder, tmp_path / "out.gguf", GGUF(quantize="f16"))
    assert "beyond 16 tokens answers differ" in caplog.text


def test_a_missing_tensor_is_named(tmp_path):
    folder = save(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"missing \(model\.layers\.1\.mlp\.up_proj\.weight"):
        export(folder, tmp_path / "out.gguf", GGUF(quantize="f16"))


def test_another_tensor_and_another_shape_are_named(tmp_path):
    folder = save(tmp_path / "model")
    edit_json(folder / "config.json", intermediate_size=96)
    with pytest.raises(ModelError, match=r"mismatched .*64.*96.*not what config"):
        export(folder, tmp_path / "out.gguf", GGUF(quantize="f16"))
    edit_json(folder / "config.json", intermediate_size=64, num_hidden_layers=2)
    with pytest.raises(ModelError, match=r"unexpected \(model\.layers\.2\."):
        export(folder, tmp_path / "out.gguf", GGUF(quantize="f16"))


@pytest.mark.parametrize("name", ["out.gguf", "out.Modelfile"])
def test_nothing_is_overwritten(models, name, tmp_path):
    (tmp_path / name).write_text("mine")
    with pytest.raises(ModelError, match="nothing is overwritten"):
        export(models("llama"), tmp_path / "out.gguf", GGUF(quantize="f16"))
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize("after", [0, 1])
def test_a_full_disk_leaves_nothing(models, after, tmp_path, monkeypatch):
    calls, write = [], files.File.write_at

    def full(self, *given):
        calls.append(given)
        if len(calls) > after:
            raise OSError(errno.ENOSPC, "No space left on device", str(self.path))
        return write(self, *given)

    folder = models("llama")
    monkeypatch.setattr(files.File, "write_at", full)
    with pytest.raises(CheckpointError, match="disk is full"):
        export(folder, tmp_path / "out.gguf", GGUF(quantize="f16"))
    assert not list(tmp_path.iterdir())


def test_rows_of_heads_and_experts_are_read_in_blocks(models, tmp_path, monkeypatch):
    for kind in ("llama", "qwen3_moe"):
        out = export(models(kind), tmp_path / f"{kind}.gguf", GGUF(quantize="f32"))
        monkeypatch.setattr("surefoot.plugins.gguf.gguf_file._MOST_READ", 1000)
        again = export(models(kind), tmp_path / f"{kind}-2.gguf", GGUF(quantize="f32"))
        first, second = values(out), values(again)
        assert all(np.array_equal(first[name], second[name]) for name in first)
        monkeypatch.undo()


def test_a_damaged_run_and_a_reward_model_are_refused(tmp_path):
    folder = save(tmp_path / "model")
    edit_json(folder / "config.json", architectures=["LlamaForSequenceClassification"])
    with pytest.raises(ModelError, match="reward model"):
        export(folder, tmp_path / "out.gguf", GGUF(quantize="f16"))
    assert json.loads((folder / "config.json").read_text())


def test_no_prompt_ends_with_the_last_token_of_texts(tmp_path):
    """llama.cpp adds it to every prompt, also to one of a chat."""
    folder = save(tmp_path / "base")
    content = json.loads((folder / "tokenizer.json").read_text())
    (end,) = (t for t in content["added_tokens"] if t["content"] == "</s>")
    piece, last = {"Sequence": {"id": "A", "type_id": 0}}, {"id": "</s>", "type_id": 0}
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [piece, {"SpecialToken": last}],
        "pair": [piece, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"</s>": {"id": "</s>", "ids": [end["id"]], "tokens": ["</s>"]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    known = AutoTokenizer.from_pretrained(folder)
    assert known("a")["input_ids"][-1] == known.eos_token_id
    export(folder, tmp_path / "out.gguf", GGUF(quantize="f32"))
    assert fields(tmp_path / "out.gguf")["tokenizer.ggml.add_eos_token"] is False


def test_a_head_size_of_its_own_is_verified(tmp_path):
    """The loader of transformers 5.23 reads no head size, and would build other shapes."""
    folder = save(tmp_path / "base", "qwen3", head_dim=32)  # not 64 / 4
    export(folder, tmp_path / "out.gguf", GGUF(quantize="f32"))
    result = verify_export(tmp_path / "out.gguf")
    assert result.is_within
    assert result.error < 1e-6


@pytest.mark.parametrize("quantize", ["f16", "q8_0", "q4_k_m", "q5_0"])
def test_what_float16_cannot_hold_is_refused_in_every_format(quantize, tmp_path):
    folder = save(tmp_path / "base", hidden_size=256)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = 1e7
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"up_proj.*|ffn_up.*exceed float16; use --quantize"):
        export(folder, tmp_path / "out.gguf", GGUF(quantize=quantize))
    assert not (tmp_path / "out.gguf").exists()
