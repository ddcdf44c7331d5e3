#!/usr/bin/env python3
"""sbatch, srun and scontrol of one machine, as far as the script needs them (linked under these
names).

FAKE_STATE: a folder of theirs. FAKE_TASKS: ranks. FAKE_PREEMPT: a path; when it exists, the tasks
of the first start get SIGTERM, once.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path


def sbatch(state, script):
    """The job, started as often as it is requeued."""
    restarts, flag = 0, state / "requeue"
    job = {"SLURM_JOB_ID": "42", "SLURM_JOB_NODELIST": "localhost"}
    while True:
        flag.unlink(missing_ok=True)
        env = {**os.environ, **job, "SLURM_RESTART_COUNT": str(restarts)}
        code = subprocess.call(["bash", script], env=env)
        with (state / "starts").open("a") as file:
            file.write(f"{code}\n")
        if not flag.exists():
            return code
        restarts += 1


def srun(state, command):
    """The tasks; all are ended together, as with --kill-on-bad-exit."""
    count = int(os.environ["FAKE_TASKS"])
    tasks = []
    for number in range(count):
        names = {"SLURM_PROCID": number, "SLURM_LOCALID": number, "SLURM_NTASKS": count}
        env = os.environ | {name: str(value) for name, value in names.items()}
        tasks.append(subprocess.Popen(command, env=env))
    if os.environ["SLURM_RESTART_COUNT"] == "0" and "FAKE_PREEMPT" in os.environ:
        threading.Thread(target=preempt, args=[tasks], daemon=True).start()
    return max(task.wait() for task in tasks)


def preempt(tasks):
    while not Path(os.environ["FAKE_PREEMPT"]).exists():
        time.sleep(0.02)
    for task in tasks:
        task.send_signal(signal.SIGTERM)


def scontrol(state, words):
    if words[0] == "show":
        print("127.0.0.1")
        return 0
    (state / "requeue").touch()
    return 0


if __name__ == "__main__":
    name, args = Path(sys.argv[0]).name, sys.argv[1:]
    state = Path(os.environ["FAKE_STATE"])
    if name == "sbatch":
        sys.exit(sbatch(state, args[0]))
    if name == "srun":
        sys.exit(srun(state, [word for word in args if not word.startswith("--kill")]))
    sys.exit(scontrol(state, args))
