"""SLURM: a batch script, which users read, and edit with what their site's pages say."""

from __future__ import annotations

import shlex

from ...errors import RunError
from .request import LaunchRequest

PROGRAM = ("sbatch",)
SETTINGS = None  # sbatch has about a hundred options, and knows them
SEES_FILES = True  # the disk of the machine on which `launch` runs
_CPUS = 'export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"  # srun does not inherit it (22.05)'
_COUNTS = {"nodes", "ntasks", "ntasks-per-node", "gpus", "gpus-per-node", "gpus-per-task"}
_REASONS = {
    "signal": "before the time limit: finish the step, save, exit",
    "requeue": "after a preemption, the same command resumes",
    "open-mode": "a requeued job continues its log",
}


def document(request: LaunchRequest) -> str:
    """The script for sbatch. Raises ``RunError`` if a setting contradicts what was checked."""
    settings = dict(request.settings)
    if contradicting := sorted(_COUNTS & settings.keys()):
        raise RunError(f"--set {contradicting[0]}: use --nodes and --gpus, which are checked")
    setup, restarts = settings.pop("setup", ""), request.number("restarts", 100)
    settings.pop("restarts", None)
    options: dict[str, str] = {
        "job-name": request.name,
        "nodes": str(request.nodes),
        "ntasks-per-node": str(request.ranks_per_node),
        **({"gpus-per-node": str(request.gpus)} if request.gpus else {}),
        "signal": "TERM@120",
        "requeue": "",
        "open-mode": "append",
        "output": f"{request.name}-%j.log",
    }
    if "gres" in settings:  # what clusters without select/cons_tres call GPUs
        options.pop("gpus-per-node", None)
    lines = ["#!/bin/bash"]
    for key, value in (options | settings).items():
        line = f"#SBATCH --{key}" + (f"={shlex.quote(value)}" if value else "")
        reason = _REASONS.get(key) if key not in settings else None
        lines.append(f"{line:<34}# {reason}" if reason else line)
    return "\n".join(
        [
            *lines,
            "",
            *([setup] if setup else []),
            'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            "export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))  # two jobs may share a machine",
            *([_CPUS] if "cpus-per-task" in settings else []),
            "",
            f"srun --kill-on-bad-exit=1 surefoot train {shlex.join(request.words)}",
            "code=$?",
            "# Over 128: a signal stopped it (it has saved) or killed it. 130: surefoot stop.",
            'if [ "$code" -gt 128 ] && [ "$code" -ne 130 ] \\',
            f'        && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {restarts} ]; then',
            '    scontrol requeue "$SLURM_JOB_ID"',
            "fi",
            'exit "$code"',
            "",
        ]
    )
