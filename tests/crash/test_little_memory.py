"""A run under ``ulimit -v``, from far too little to enough: it ends well, or with an error for
people, and with more it goes on to the same weights."""

import resource
import shutil
import subprocess
from functools import partial

import pytest

import surefoot
from project import Project, assert_same, checkpoints, final_weights, start
from surefoot.checkpoint.verification import verify

MIB = 1 << 20


def limited(size):
    resource.setrlimit(resource.RLIMIT_AS, (size, size))


@pytest.mark.proof
def test_a_run_with_any_limit_of_address_space(tmp_path):
    project = Project(tmp_path, train={"max_steps": 3})
    surefoot.train(project.recipe, train={"output_dir": str(tmp_path / "whole")})
    codes = []
    for mebibytes in (200, 500, 900, 1200, 1500, 1800, 2100, 2500, 3000, 4000, 8000):
        make = partial(subprocess.Popen, preexec_fn=partial(limited, mebibytes * MIB))
        process = start("train", project.recipe, popen=make)
        _, err = process.communicate(timeout=180)
        codes.append(process.returncode)
        # while Python itself cannot import its libraries, nobody is there to say it better
        assert "Traceback" not in err or "import" in err, (mebibytes, err)
        assert not [path for path in checkpoints(project.run) if not verify(path).ok]
        surefoot.train(project.recipe)
        assert_same(final_weights(project.run), final_weights(tmp_path / "whole"))
        shutil.rmtree(project.run)
    assert codes[0] != 0
    assert codes[-1] == 0
