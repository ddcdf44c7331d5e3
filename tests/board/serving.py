"""A board as a user starts it: a process of its own."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"


class Server:
    """``surefoot board ROOT`` on a free port."""

    def __init__(self, root, *options, port=0):
        environment = {**os.environ, "PYTHONPATH": str(SOURCE), "PYTHONUNBUFFERED": "1"}
        began = time.monotonic()
        command = [sys.executable, "-m", "surefoot", "board", str(root), f"--port={port}", *options]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, text=True
        )
        self.said = ""
        for line in self.process.stdout:
            self.said += line
            if found := re.search(r"(http://\S+?:(\d+)/)", line):
                break
        assert found, self.said
        self.address, self.port = found[1], int(found[2])
        self.seconds = time.monotonic() - began

    @property
    def cpu_seconds(self):
        """Processor time so far: what a busy machine does not change."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def kill(self):
        """As a crash ends it."""
        self.process.kill()
        self._end()

    def close(self):
        """As Ctrl-C ends it."""
        self.process.send_signal(signal.SIGINT)
        self._end()

    def _end(self):
        self.process.wait(20)
        self.process.stdout.close()
