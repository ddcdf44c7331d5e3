"""What we write computes in transformers 4 what it computes in 5; ``make interop`` runs this."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from folders import save_model
from surefoot.checkpoint.disk.folder import tokenizer_of
from surefoot.model.config import read_config
from surefoot.model.section import ModelSection
from surefoot.model.tokenizer import load_tokenizer
from surefoot.model.weights import model_files, tokenizer_files
from zoo.architectures import SETTINGS, build

PYTHON = os.environ.get("TRANSFORMERS_4_PYTHON")
pytestmark = pytest.mark.skipif(not PYTHON, reason="needs TRANSFORMERS_4_PYTHON; see make interop")

IDS = torch.arange(3, 80)[None] % 60
BASIC = {"factor": 4.0, "original_max_position_embeddings": 32}
SCALINGS = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": BASIC,
    "llama3": {**BASIC, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
# Families of which transformers 4 and 5 compute different things from one folder: one that 4 wrote
# by itself gives other logits in 5, by this share of the largest one. What we write opens in 4.
OTHER = {
    "apertus": "1e-3: the parameters of xIELU are bfloat16 in 4",
    "qwen2_moe:window": "0.6 behind the first window: 4 has another mask",
    "recurrent_gemma": "1 from the first token on",
    "zamba2": "up to 3e-2: 4 scans in another way",
}
SCALED = (
    "llama",
    "qwen3",
    "mistral",
    "gemma3_text",
    "olmo3",
    "phi",
    "glm4",
    "deepseek_v3",
    "gpt_oss",
)


def read_there(root):
    torch.save(IDS, root / "ids.pt")
    command = [PYTHON, Path(__file__).with_name("theirs_4.py"), root]
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=clean)
    assert done.returncode == 0, done.stderr[-2000:]
    return torch.load(root / "logits.pt"), json.loads(done.stdout.splitlines()[-1])


def write(model, folder):
    """The model as a checkpoint has it, and its logits here."""
    model.save_pretrained(folder)
    for name, data in model_files(model, None, ()).items():
        (folder / name).write_bytes(data)
    with torch.no_grad():
        return model(IDS).logits


def rescaled(name, kind):
    """The architecture with a rope that is nobody's default; None if it has none to change."""
    rope = getattr(build(name).config, "rope_parameters", None)
    if not rope or not isinstance(rope.get("full_attention", rope), dict):
        return None
    changed = json.loads(json.dumps(rope))
    for at in [changed[key] for key in changed if isinstance(changed[key], dict)] or [changed]:
        at["rope_theta"] = 54321.0
    if name.startswith("gemma3"):
        changed["sliding_attention"]["rope_theta"] = 777.0
    if kind != "default":
        changed.get("full_attention", changed).update(rope_type=kind, **SCALINGS[kind])
    return build(name, "eager", rope_parameters=changed)


def test_logits_are_the_same_in_transformers_4_for_every_family(tmp_path):
    expected = {}
    for name in sorted(SETTINGS):
        for kind in SCALINGS if name in SCALED else ["default"]:
            try:
                model = rescaled(name, kind) or build(name, "eager")
            except ValueError:  # no eager attention
                continue
            folder = f"{name.replace(':', '-')}.{kind}"
            expected[folder] = write(model, tmp_path / folder)
    found, said = read_there(tmp_path)
    unknown = {name for name, why in said["errors"].items() if "does not recognize" in why}
    assert said["errors"].keys() == unknown, said["errors"]
    assert len(found) > 60
    wrong = {
        name: (found[name] - logits).abs().max().item() / logits.abs().max().item()
        for name, logits in expected.items()
        if name in found and name.partition(".")[0].replace("-window", ":window") not in OTHER
    }
    assert {name: error for name, error in wrong.items() if error > 1e-5} == {}


def test_more_positions_and_long_rope_are_the_same_in_transformers_4(tmp_path):
    base = save_model(tmp_path.parent / f"{tmp_path.name}-base")
    expected = {}
    for kind in ("yarn", "linear", "llama3"):
        section = ModelSection(path=str(base), max_positions=1024, rope_scaling=kind)
        rope = read_config(base, section).rope_parameters
        model = build("llama", "eager", max_position_embeddings=1024, rope_parameters=rope)
        expected[kind] = write(model, tmp_path / kind)
    long = {"rope_type": "longrope", "rope_theta": 5e4, "original_max_position_embeddings": 32}
    long |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    model = build("phi3", "eager", rope_parameters=long, original_max_position_embeddings=32)
    expected["longrope"] = write(model, tmp_path / "longrope")
    found, said = read_there(tmp_path)
    assert said["errors"] == {}
    assert {
        name: (found[name] - expected[name]).abs().max().item() < 1e-5 for name in expected
    } == dict.fromkeys(expected, True)


def test_tokenizers_open_in_transformers_4(tmp_path):
    """The base's own files stay; with new tokens, they are written in words of both."""
    base = save_model(tmp_path.parent / f"{tmp_path.name}-base")
    config = json.loads((base / "tokenizer_config.json").read_text())
    config["additional_special_tokens"] = config.pop("extra_special_tokens")
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    (base / "tokenizer_config.json").write_text(json.dumps(config))
    expected = {}
    for name, new in (("own", []), ("new", ["<new>"])):
        known = load_tokenizer(base, new_special_tokens=new)
        for file, data in tokenizer_files(known, tokenizer_of(base)).items():
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / file).write_bytes(data)
        said = [{"role": "user", "content": "Hé <new> x"}]
        text = known.apply_chat_template(said, tokenize=False)
        expected[name] = [text, known(text)["input_ids"], known.pad_token]
    _, said = read_there(tmp_path)
    assert (said["errors"], said["ids"]) == ({}, expected)
