"""A Ray cluster of two nodes on this machine, with one core each, and commands that run on it."""

import os
import subprocess
import sys
import time

import pytest

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # keeps all of it on 127.0.0.1
    "RAY_AUTH_MODE": "disabled",  # else a token is written to the home folder
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
}
SECONDS = 300  # for whatever a test waits for, on two cores


def surefoot(log, *words, **options):
    """A command whose output goes to ``log``."""
    command = [sys.executable, "-P", "-m", "surefoot", *map(str, words)]
    options["env"] = {**os.environ, **ENVIRONMENT, **options.get("env", {})}
    return subprocess.Popen(command, stdout=log, stderr=log, **options)


class TwoNodes:
    """The cluster, and one command on it at a time."""

    def __init__(self, log, **resources):
        for name, value in ENVIRONMENT.items():
            os.environ[name] = value  # before Ray is imported
        reason = "needs pip install -e '.[ray]'"
        utils = pytest.importorskip("ray.cluster_utils", reason=reason)
        self.of_node = {"num_cpus": 1, "node_ip_address": "127.0.0.1", **resources}
        self.log, self.driver = log, None
        self.cluster = utils.Cluster(initialize_head=True, head_node_args=self.of_node)
        self.node = self.add_node()

    def add_node(self):
        """One more."""
        return self.cluster.add_node(**self.of_node)

    def lose_node(self):
        """The second one is gone at once."""
        self.cluster.remove_node(self.node, allow_graceful=False)

    def start(self, *words, **options):
        """Start a command."""
        with self.log.open("w") as log:
            self.driver = surefoot(log, *words, **options)

    def wait_for(self, condition):
        """Wait while the command runs."""
        deadline = time.monotonic() + SECONDS
        while not condition():
            assert self.driver.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)

    def wait(self, code=0):
        """Wait for its end, with the exit code ``code``; what it has printed."""
        assert self.driver.wait(SECONDS) == code, self.log.read_text()
        return self.log.read_text()

    def shutdown(self):
        """End all of it."""
        if self.driver is not None:
            self.driver.kill()
            self.driver.wait()
        self.cluster.shutdown()
