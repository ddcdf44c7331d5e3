"""A board as a user starts it, a process of its own, or in a thread of this one."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import uvicorn

from surefoot.storage.web import PromptProtocol, bound

SOURCE = Path(__file__).parents[3] / "src"


class Server:
    """``surefoot board ROOT`` on a free port."""

    def __init__(self, root, *options, port=0):
        environment = {**os.environ, "PYTHONPATH": str(SOURCE), "PYTHONUNBUFFERED": "1"}
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


@contextlib.contextmanager
def served(app):
    """``app`` in a thread, as a board and ``surefoot serve`` serve it; its port."""
    listener = bound("127.0.0.1", 0, "board")
    config = uvicorn.Config(app, http=PromptProtocol, log_level="critical", limit_concurrency=16)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
