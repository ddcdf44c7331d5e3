"""The cases of the kit, most telling first, each with the seconds it may take.

A case is one program run once on one GPU: its part, its name, who is measured, and the settings
that the program reads. ``tiny`` gives the same cases in sizes that a CPU runs in seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

FOLDER = Path(__file__).parent
TRAINERS = FOLDER.parent / "trainers"


@dataclass(frozen=True)
class Case:
    """One program, run once."""

    part: str
    name: str
    subject: str
    program: Path
    seconds: int  # that it may take on a GPU, the start of Python included
    shape: str = ""  # of the model, see shapes.py
    rows: str = ""  # of the data, see shapes.py
    needs: tuple[str, ...] = ()  # modules without which it is not run
    settings: Mapping[str, object] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str, str]:
        """What identifies its result."""
        return self.part, self.name, self.subject


@dataclass(frozen=True)
class Work:
    """One training task, the same for all subjects."""

    name: str
    shape: str
    rows: str
    cutoff_len: int
    examples: int  # a step
    micro: int  # examples per micro-batch of a padded peer
    own_micro: int  # of Surefoot, and of a peer that packs
    seconds: int
    settings: Mapping[str, object] = field(default_factory=dict)


NEEDS = {
    "trainer-liger": ("liger_kernel", "triton"),
    "trl-packing": ("trl",),
    "trl-packing_liger": ("trl", "liger_kernel", "triton"),
    "trl_dpo-padded": ("trl",),
    "surefoot-float8": ("torchao",),
    "surefoot-compile_float8": ("torchao",),
    "trl_dpo-liger": ("trl", "liger_kernel", "triton"),
}
LORA = {"method": "lora", "rank": 16, "dtype": "bfloat16"}
QLORA = {**LORA, "bits": 4}
DPO = {"stage": "dpo", "steps": 5, "warmup": 2}
FEW = {"steps": 8, "warmup": 3}
COMPILING = 60  # seconds more
ONCE = {"stage": "dpo", "steps": 3, "warmup": 1}
RECOMPUTED = {"recompute": True}


def _pairs(k: int) -> Work:
    """One preference pair a step, with a prompt of so many thousand tokens; 80 GB end near 7k with
    the prompt in both sequences and near 14k with it once, so the longest are recomputed."""
    title = "dpo 1.7B" if k <= 16 else "dpo 1.7B recomputed"
    settings = ONCE if k <= 16 else {**ONCE, **RECOMPUTED}
    length = (k + 2) * 1024
    return Work(f"{title}, prompts of {k}k", "1.7B", f"pairs-{k}k", length, 1, 1, 1, 45, settings)


# Micro-batches are sized for 80 GB: a padded batch of chats is about four times as large as its
# tokens, and its logits of 151,936 values take 14 bytes each.
WORKS = {
    work.name: work
    for work in (
        Work("full 1.7B, chats", "1.7B", "chats", 2048, 64, 8, 32, 30),
        Work("full 0.6B, chats", "0.6B", "chats", 2048, 128, 16, 64, 25),
        Work("lora 8B, chats", "8B", "chats", 2048, 32, 4, 16, 45, LORA),
        Work("qlora 8B, chats", "8B", "chats", 2048, 32, 4, 16, 60, QLORA),
        Work("full 1.7B, rows of 2k", "1.7B", "2k", 2048, 8, 2, 4, 30),
        Work("full 1.7B, rows of 8k", "1.7B", "8k", 8192, 2, 1, 1, 30, FEW),
        Work("full 1.7B, rows of 32k", "1.7B", "32k", 32_768, 1, 1, 1, 40, {**FEW, **RECOMPUTED}),
        Work("dpo 1.7B, prompts of 2k", "1.7B", "pairs-2k", 4096, 4, 1, 2, 45, DPO),
        *map(_pairs, (4, 6, 8, 10, 12, 16, 32, 64, 96)),
    )
}
# Name of the work, and who is measured with it; the order is that of the runs.
ORDER: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("full 1.7B, chats", ("surefoot", "trainer-liger", "trainer-padded")),
    ("lora 8B, chats", ("surefoot", "trainer-liger", "trl-packing_liger")),
    ("dpo 1.7B, prompts of 2k", ("surefoot", "trl_dpo-padded")),
    ("full 1.7B, chats", ("trl-packing_liger", "surefoot-fast")),
    ("full 1.7B, rows of 8k", ("surefoot", "trainer-liger")),
    ("full 1.7B, rows of 2k", ("surefoot", "trainer-liger")),
    ("dpo 1.7B, prompts of 8k", ("surefoot", "trl_dpo-padded")),
    ("dpo 1.7B, prompts of 12k", ("surefoot",)),
    ("dpo 1.7B, prompts of 6k", ("trl_dpo-padded", "surefoot")),
    ("full 0.6B, chats", ("surefoot", "trainer-padded", "trainer-liger")),
    ("full 1.7B, rows of 32k", ("surefoot", "trainer-liger")),
    ("qlora 8B, chats", ("surefoot", "trainer-liger")),
    ("lora 8B, chats", ("trainer-padded", "trl-packing", "surefoot-fast")),
    ("dpo 1.7B, prompts of 10k", ("trl_dpo-padded", "surefoot")),
    ("dpo 1.7B, prompts of 16k", ("surefoot", "trl_dpo-padded")),
    ("dpo 1.7B, prompts of 4k", ("trl_dpo-padded", "surefoot")),
    ("dpo 1.7B recomputed, prompts of 32k", ("trl_dpo-padded", "surefoot")),
    ("dpo 1.7B recomputed, prompts of 64k", ("trl_dpo-padded", "surefoot")),
    ("dpo 1.7B recomputed, prompts of 96k", ("surefoot", "trl_dpo-padded")),
    ("dpo 1.7B, prompts of 2k", ("trl_dpo-liger",)),
    ("full 1.7B, chats", ("trl-packing",)),
    ("full 0.6B, chats", ("trl-packing_liger", "surefoot-fast")),
    ("full 1.7B, chats", ("surefoot-bf16", "surefoot-compile", "surefoot-compile_float8")),
    ("full 1.7B, chats", ("surefoot-float8",)),
)
# What we want of Surefoot, beside the best that was published for one H100 by November 2026
GOALS = {
    "lora 8B, chats": "at least 12,500 tokens a second (NeMo Automodel's performance summary: "
    "12,473 with Llama 3 8B and sequences of 4,096)",
    "full 0.6B, chats": "an MFU of at least 35 % (prime-rl's results: 23.7 % with Qwen3-0.6B and "
    "sequences of 16k)",
}
# Vocabularies (Llama 2's, Qwen's, Gemma's, about) and hidden sizes of the output head alone
HEADS = ((151_936, 2048), (32_768, 2048), (262_144, 2048))
HEADS += ((151_936, 4096), (262_144, 4096), (32_768, 4096))
HEADS_AFTER = 3  # cases of training
TITLES = {
    "heads": "Output heads",
    "head-surefoot": "Surefoot, chunks of 384 positions",
    "head-surefoot_1024": "Surefoot, chunks of 1,024 positions",
    "head-surefoot_4096": "Surefoot, chunks of 4,096 positions",
    "head-logits": "full logits, then cross entropy",
    "head-torch": "torch's `linear_cross_entropy`, chunked",
    "head-liger": "Liger's fused linear cross entropy",
    "surefoot": "Surefoot",
    "surefoot-fast": "Surefoot, `train.deterministic: false`",
    "surefoot-bf16": "Surefoot, bfloat16 weights, stochastic rounding",
    "surefoot-compile": "Surefoot, compiled layers",
    "surefoot-compile_float8": "Surefoot, compiled layers, float8 `rowwise`",
    "surefoot-float8": "Surefoot, float8 `rowwise`",
    "trainer-padded": "Hugging Face Trainer, padded (default)",
    "trainer-liger": "Hugging Face Trainer, padded, Liger's kernels",
    "trl-packing": "TRL SFTTrainer, packing",
    "trl-packing_liger": "TRL SFTTrainer, packing, Liger's kernels",
    "trl_dpo-padded": "TRL DPOTrainer, padded (its fused head)",
    "trl_dpo-liger": "TRL DPOTrainer, padded, Liger's layers",
    "limits": "copy to pinned memory, write to the disk",
    "torch": "torch.save",
}


def speed() -> list[Case]:
    """Tokens a second, utilisation and peak memory."""
    limits = Case("speed", "limits", "limits", FOLDER / "gemm_case.py", 20)
    found = [_speed(WORKS[name], subject) for name, subjects in ORDER for subject in subjects]
    found[HEADS_AFTER:HEADS_AFTER] = [_head(*HEADS[0])]
    place = HEADS_AFTER + 1 + sum(len(subjects) for _, subjects in ORDER[1:4])
    found[place:place] = [_head(*sizes) for sizes in HEADS[1:]]
    return [limits, *found]


def _head(vocabulary: int, hidden: int) -> Case:
    """The output head and its loss, alone, by every subject that is there."""
    settings = {
        "vocabulary": vocabulary,
        "hidden": hidden,
        "tokens": (8192, 32_768, 4096),
        "sample": 1024,
    }
    program = FOLDER / "head_case.py"
    return Case("speed", head_name(settings), "heads", program, 60, settings=settings)


def head_name(settings: Mapping[str, object]) -> str:
    """The name of a case of heads."""
    return f"head {settings['vocabulary']:,} x {settings['hidden']:,}"


def _speed(work: Work, subject: str) -> Case:
    program, _, variant = subject.partition("-")
    micro = work.own_micro if program == "surefoot" or "packing" in variant else work.micro
    settings = {
        "variant": variant,
        "method": "full",
        "batch": work.examples,
        "micro": micro,
        "steps": 12,
        "warmup": 4,
        "cutoff_len": work.cutoff_len,
        "deterministic": variant != "fast",
        **work.settings,
    }
    needs = NEEDS.get(subject, ())
    return Case(
        "speed",
        work.name,
        subject,
        TRAINERS / f"with_{program}.py",
        work.seconds + (COMPILING if "compile" in variant else 0),
        work.shape,
        work.rows,
        (*needs, "bitsandbytes") if settings.get("bits") else needs,
        settings,
    )


def save() -> list[Case]:
    """Saves of 3 to 20 GB of state, and the resume from them."""
    program = FOLDER / "save_case.py"
    limits = Case("save", "limits", "limits", program, 40, settings={"task": "limits", "gb": 4})
    found = [
        Case(
            "save",
            f"full {shape}",
            "surefoot",
            program,
            seconds,
            shape,
            "chats",
            settings={"task": "train", "batch": batch, "cutoff_len": 2048},
        )
        for shape, seconds, batch in (("1.7B", 150, 32), ("0.25B", 60, 64), ("0.6B", 90, 64))
    ]
    blocking = replace(found[0], subject="torch", seconds=90)
    blocking = replace(blocking, settings={**blocking.settings, "task": "torch"})
    return [limits, *found, blocking]


def profile() -> list[Case]:
    """The kernels of a step, idle gaps and host time."""
    program = FOLDER / "profile_case.py"
    names = ("full 1.7B, chats", "full 1.7B, rows of 8k", "dpo 1.7B, prompts of 2k")
    names += ("lora 8B, chats", "full 0.6B, chats")
    cases = [_speed(WORKS[name], "surefoot") for name in names]
    return [
        replace(
            case,
            part="profile",
            program=program,
            seconds=case.seconds + 30,
            settings={**case.settings, "steps": 9, "warmup": 4},
        )
        for case in cases
    ]


CASES = {"speed": speed, "save": save, "profile": profile}


def tiny(cases: list[Case]) -> list[Case]:
    """The same cases in sizes for a CPU: other shapes and rows, fewer steps, smaller batches. Of
    those that are then the same, the first."""
    found: dict[str, Case] = {}
    for case in cases:
        small = replace(case, **_shrunk(case))
        same = (small.subject, small.shape, small.rows, sorted(small.settings.items()))
        found.setdefault(repr(same), small)
    return list(found.values())


def _shrunk(case: Case) -> dict[str, object]:
    settings = {**case.settings}
    smaller = {"batch": 4, "micro": 2, "steps": 3, "warmup": 1, "cutoff_len": 256, "gb": 0.01}
    smaller |= {"sample": 400}  # more than a chunk
    if "tokens" in settings:  # the names keep the vocabularies apart
        settings |= {"vocabulary": 1024, "hidden": 32, "tokens": (64, 512), "seconds": 0.01}
    settings |= {name: smaller[name] for name in smaller if name in settings}
    if case.part == "save":
        settings |= {"before": 1, "after": 1}
    kind = "pairs-tiny" if case.rows.startswith("pairs") else "tiny"
    return {
        "shape": case.shape and "tiny",
        "rows": case.rows and kind,
        "settings": settings,
        "seconds": 10,
    }
