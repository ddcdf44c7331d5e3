"""Hours of hostile headers, manifests and index files, guided by the code they reach."""

import importlib.util
import os
import re
import subprocess
import sys

import pytest

from .test_kills import ENVIRONMENT, TESTS

SECONDS = int(os.environ.get("SUREFOOT_FUZZ_SECONDS", "60"))


@pytest.mark.proof
@pytest.mark.skipif(not importlib.util.find_spec("atheris"), reason="pip install -e .[fuzz]")
@pytest.mark.parametrize("target", ["header", "manifest", "index", "folder", "rules", "list"])
def test_nothing_but_an_error_for_people_comes_out_of_a_parser(tmp_path, target):
    options = [f"-max_total_time={SECONDS}", "-rss_limit_mb=1024", "-timeout=10", "-max_len=8192"]
    command = [sys.executable, "-m", "crash.fuzz", target, tmp_path / "corpus", *options]
    done = subprocess.run(
        command, cwd=TESTS, env=ENVIRONMENT, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    tried = re.search(r"Done (\d+) runs", done.stderr)
    assert int(tried.group(1)) > 1000
    print(f"{target}: {tried.group(0)}")
