"""Examples, settings and datasets for each stage, for tests that run all of them."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from surefoot.batch import IGNORE_INDEX
from surefoot.data.store.dataset import in_memory
from surefoot.data.text.collation import join
from surefoot.schema.locations import FunctionPath
from surefoot.stages import STAGES
from surefoot.training.rewards import FunctionReward

REWARD = Path(__file__).parent / "stage_rewards.py"
SETTINGS = {
    "grpo": {
        "reward": (FunctionReward(path=FunctionPath(f"{REWARD}:varied")),),
        "group_size": 3,
        "passes": 2,
        "mini_batches": 2,
        "max_new_tokens": 5,
        "beta": 0.05,
    },
    "ppo": {
        "reward": (FunctionReward(path=FunctionPath(f"{REWARD}:varied")),),
        "passes": 2,
        "mini_batches": 2,
        "max_new_tokens": 5,
        "kl_target": 0.01,
        "kl_horizon": 20,
        "normalize_scores": True,
        "whiten_rewards": True,
    },
    "classify": {"labels": ("small", "large", "huge"), "label_weights": {"large": 2.0}},
    "distill": {"on_policy": 0.5, "max_new_tokens": 5, "sft_weight": 0.5},
}
DATASETS = {
    "dpo": "pairs",
    "rm": "pairs",
    "kto": "marked",
    "classify": "labeled",
}  # of the others: sums


# of numbers as words; each token is its own number
class _Tokenizer:
    def __len__(self):
        return 64

    def decode(self, ids, **_):
        return " ".join(map(str, ids))


CODEC = SimpleNamespace(
    tokenizer=_Tokenizer(),
    stop_token_ids=(),
    section=SimpleNamespace(longest=128, cutoff_len=128),
    fingerprint="numbers",
    media=None,
    reads=lambda key, of: False,
    response_text=_Tokenizer().decode,
)


def stage_of(name, **settings):
    """A stage with settings that are quick to run."""
    return STAGES[name](**{**SETTINGS.get(name, {}), **settings})


def written(name):
    """The same as a recipe has it."""
    settings = SETTINGS[name].items()
    return {name: {key: str(v[0].path) if key == "reward" else v for key, v in settings}}


def examples_of(name, count=14, seed=5):
    """Encoded examples of a stage, of tokens below 64."""
    random = np.random.default_rng(seed)
    return in_memory([_example(name, random, i) for i in range(count)])


def _example(name, random, index):
    prompt = random.integers(3, 64, random.integers(2, 6)).tolist()
    answers = [random.integers(3, 64, random.integers(1, 6)).tolist() for _ in range(2)]
    items = [
        {"input_ids": prompt + answer, "labels": [IGNORE_INDEX] * len(prompt) + answer}
        for answer in answers
    ]
    if name in ("dpo", "rm"):
        return {**join(*items), **({"margin": [0]} if name == "rm" else {})}
    if name == "kto":
        return {**items[0], "desirable": [index % 3 > 0]}
    if name == "classify":
        ids = prompt + answers[0]
        labels = [IGNORE_INDEX] * (len(ids) - 1) + ids[-1:]
        return {"input_ids": ids, "labels": labels, "classes": [index % 3]}
    if name in ("grpo", "ppo"):
        row = json.dumps({"gold": index}).encode()
        return {"input_ids": prompt, "labels": [IGNORE_INDEX] * len(prompt), "row": row}
    return items[0]
