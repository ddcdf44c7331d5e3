"""SLURM: a batch script, which users read, and edit with what their site's pages say."""

from __future__ import annotations

import shlex

from ...errors import RunError, similar
from .request import LaunchRequest

PROGRAM = ("sbatch",)
SETTINGS = None  # sbatch has about a hundred options, and knows them
SEES_FILES = True  # the disk of the machine on which `launch` runs
_CPUS = 'export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"  # srun does not inherit it (22.05)'
# Of Slurm 25.05. Sites add options of their own (SPANK), so others are refused only if they look
# like one of these.
_OPTIONS = """
    account acctg-freq array batch bb bbf begin chdir cluster-constraint clusters comment
    constraint container container-id contiguous core-spec cores-per-socket cpu-freq
    cpus-per-gpu cpus-per-task cpus-per-tres deadline delay-boot dependency distribution error
    exclude exclusive export export-file extra extra-node-info get-user-env gid gpu-bind
    gpu-freq gpus gpus-per-node gpus-per-socket gpus-per-task gres gres-flags hint hold
    ignore-pbs input job-name kill-on-invalid-dep licenses mail-type mail-user mcs-label mem
    mem-bind mem-per-cpu mem-per-gpu mem-per-tres mincpus network nice no-kill no-requeue
    nodefile nodelist nodes ntasks ntasks-per-core ntasks-per-gpu ntasks-per-node
    ntasks-per-socket oom-kill-step open-mode output overcommit oversubscribe parsable partition
    power prefer priority profile propagate qos quiet reboot requeue reservation resv-ports
    segment signal sockets-per-node spread-job stepmgr switches test-only thread-spec
    threads-per-core time time-min tmp tres-bind tres-per-job tres-per-node tres-per-socket
    tres-per-task uid use-min-nodes verbose wait wait-all-nodes wckey
"""
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
    known = _OPTIONS.split()
    for key in sorted(settings.keys() - {*known, "setup", "restarts"}):
        if near := similar(key, known, cutoff=0.85):
            raise RunError(
                f"--set {key}: sbatch has no such option; did you mean {near[0]}? For an option of "
                f"your site alone, write --set setup='#SBATCH --{key}=...'"
            )
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
