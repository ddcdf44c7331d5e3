"""Draw the pictures of ``docs/how-to/loss.md``: what a loss looks like if a setting is wrong.

    .venv/bin/python benchmarks/loss_curves.py [--only overfitting] [--into docs/img]

Each is of two runs of ``examples/quickstart.yaml``, one as it should be and one with a wrong
setting, so a picture shows what the program does. Nothing here is timed.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

from learning import EXAMPLES, surefoot

Curve = list[tuple[int, float]]  # steps and losses
RIGHT = ("train.max_steps=100", "train.log_steps=1", "train.eval_epoch=false")
RATE = "optim.adamw.learning_rate"


@dataclass(frozen=True)
class Case:
    """The settings of two runs that are compared."""

    wrong: tuple[str, ...]
    right: tuple[str, ...] = ()
    is_evaluated: bool = False


CASES = {
    "rate-too-high": Case((f"{RATE}=0.3",)),
    "rate-too-low": Case((f"{RATE}=4e-5",)),
    "no-warmup": Case(
        ("method=full", f"{RATE}=2e-2", "optim.adamw.warmup_ratio=0"),
        ("method=full", f"{RATE}=2e-2", "optim.adamw.warmup_ratio=0.2"),
    ),
    "overfitting": Case(
        ("train.eval_steps=10", "data.max_samples=64", "method=full"),
        ("train.eval_steps=10", "method=full"),
        is_evaluated=True,
    ),
    "prompts-trained": Case(("data.train_on_prompt=true",)),
}


def curves(folder: Path, case: Case, settings: tuple[str, ...]) -> dict[str, Curve]:
    """Both losses of a run of the quick start with these settings."""
    run = Path(tempfile.mkdtemp(dir=folder))
    evaluated = () if case.is_evaluated else ("data.eval_datasets=[]",)
    words = (*RIGHT, *evaluated, "checkpoint.save_steps=1000", f"train.output_dir={run}", *settings)
    surefoot(folder, "train", "examples/quickstart.yaml", *words)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {key: [(x["step"], x[key]) for x in lines if key in x] for key in ("loss", "eval_loss")}


def draw(right: dict[str, Curve], wrong: dict[str, Curve], file: Path) -> None:
    """One small picture: the wrong run is red; evaluations are dashed."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6, 2.3), layout="constrained")
    axes = figure.add_subplot()
    for label, color, found in (("so", "tab:red", wrong), ("as it should be", "tab:gray", right)):
        for key, style in (("loss", "-"), ("eval_loss", "--")):
            if curve := found[key]:
                name = label if key == "loss" else f"{label}, evaluation"
                axes.plot(*zip(*curve, strict=True), style, color=color, label=name, linewidth=1.3)
    axes.set(xlabel="step", ylabel="loss", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "surefoot"}):  # letters as text
        figure.savefig(file, metadata={"Date": None})


def main() -> None:
    """Train, draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", choices=CASES, help="one picture")
    parser.add_argument("--into", type=Path, default=EXAMPLES.parent / "docs" / "img")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "examples").symlink_to(EXAMPLES)
        for title in [options.only] if options.only else CASES:
            case = CASES[title]
            right, wrong = curves(folder, case, case.right), curves(folder, case, case.wrong)
            draw(right, wrong, options.into / f"loss-{title}.svg")
            last = {key: (right[key][-1][1], wrong[key][-1][1]) for key in right if right[key]}
            print(json.dumps({title: last}), flush=True)


if __name__ == "__main__":
    main()
