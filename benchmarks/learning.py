"""Every stage learns what its example is for: a measure on held-out data before and after, and its
curve.

    .venv/bin/python benchmarks/learning.py [--stages sft,rm,dpo,kto,grpo,ppo,distill] [--draw FILE]

The recipes are those of ``examples/``, unchanged but for how often they are evaluated. The first
trains the model that the others continue from. Nothing here is timed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from measure import say

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
Curve = list[tuple[int, float]]  # steps and values


@dataclass(frozen=True)
class Case:
    """What to look at in a run of a recipe."""

    recipe: str
    key: str  # in metrics.jsonl
    what: str
    eval_steps: int
    before: tuple[str, ...] = ()  # a command that must have run


CASES = {
    "sft": Case("quickstart.yaml", "eval_loss", "held-out loss", 47),
    "rm": Case("rm.yaml", "eval_rewards/accuracies", "held-out pairs right", 4),
    "classify": Case("classify.yaml", "eval_f1_macro", "held-out F1", 4),
    "dpo": Case("dpo.yaml", "eval_rewards/margins", "held-out margin", 8),
    "kto": Case("kto.yaml", "eval_loss", "held-out loss", 8),
    "grpo": Case("grpo.yaml", "eval_reward", "held-out reward", 20),
    "ppo": Case("ppo.yaml", "eval_reward", "held-out reward", 40),
    "distill": Case(
        "distill.yaml",
        "eval_divergence",
        "held-out KL from the teacher",
        94,
        before=("export", "runs/quickstart", "runs/teacher"),
    ),
}


def surefoot(folder: Path, *arguments: str) -> str:
    """What a command prints."""
    command = [sys.executable, "-m", "surefoot", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}:\n{done.stdout}\n{done.stderr}")
    return done.stdout


def trained(folder: Path, case: Case) -> Curve:
    """The measure at every evaluation of a run."""
    often = f"train.eval_steps={case.eval_steps}"
    surefoot(folder, "train", f"examples/{case.recipe}", often, "train.eval_epoch=false")
    run = folder / "runs" / Path(case.recipe).stem
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row[case.key]) for row in rows if case.key in row]


def measured(folder: Path, case: Case, *arguments: str) -> tuple[float, str]:
    """The measure of a model, and the share of held-out responses that are the expected ones."""
    printed = surefoot(folder, "eval", f"examples/{case.recipe}", "--json", *arguments)
    found = json.loads(printed)
    is_right = found.get("exact_match")  # None: it wrote no responses
    said = "no responses" if is_right is None else f"{100 * is_right:.0f} % exact"
    return found[case.key.removeprefix("eval_")], said


def draw(curves: dict[str, Curve], file: Path) -> None:
    """One small picture for each stage."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.6 * len(curves), 2.4), layout="constrained")
    for axes, (stage, curve) in zip(figure.subplots(1, len(curves)), curves.items(), strict=True):
        axes.plot(*zip(*curve, strict=True), marker=".")
        axes.set_title(stage)
        axes.set_xlabel("step")
        axes.set_ylabel(CASES[stage].what)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    with rc_context({"svg.fonttype": "none"}):  # letters as text: a fifth of the size
        figure.savefig(file)


def main() -> None:
    """Train, measure, say."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--stages", default=",".join(CASES), help="which, in this order")
    parser.add_argument("--draw", type=Path, help="write the curves to this file (svg, png)")
    options = parser.parse_args()
    curves: dict[str, Curve] = {}
    report: dict[str, dict[str, float | str]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "examples").symlink_to(EXAMPLES)
        for stage in dict.fromkeys(["sft", *options.stages.split(",")]):
            case = CASES[stage]
            if case.before:
                surefoot(folder, *case.before)
            first, before = measured(folder, case, "--model", "base")
            curves[stage] = [(0, first), *trained(folder, case)]
            last, after = measured(folder, case)
            say(f"{stage}: {case.what} {first:.3g} ({before}), then {last:.3g} ({after})")
            report[stage] = {"before": first, "after": last, "responses": after}
    if options.draw:
        draw(curves, options.draw)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
