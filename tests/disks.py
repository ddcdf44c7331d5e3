"""Small file systems."""

import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(options):
    """A file system of its own in memory, which root alone can make."""
    folder = Path(tempfile.mkdtemp(prefix="surefoot-disk-"))
    command = ["mount", "-t", "tmpfs", "-o", options, "surefoot-test", str(folder)]
    try:
        mounted = subprocess.run(command, check=False, capture_output=True).returncode == 0
    except FileNotFoundError:
        mounted = False
    try:
        if not mounted:
            pytest.skip("no file system can be mounted here")
        yield folder
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)
        folder.rmdir()
