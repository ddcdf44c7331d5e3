"""What is freed stays with the process."""

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource
from surefoot.model.numerics import keep_freed_memory

def faults():  # pages that this process has been given so far
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

keep_freed_memory()
make = lambda: bytearray(b"x") * (64 * 2**20)
make()
before = faults()
for _ in range(10):
    make()
print(faults() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is of glibc alone")
def test_a_large_block_is_had_again_without_new_pages():
    # in a process of its own: it is for a whole process, and its heap decides
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 10 * 64 * 2**20 / 4096 / 4
