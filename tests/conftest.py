"""What every test may rely on: the tiny models on the path, one thread, no network, no user cache."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
for folder in ("", "training", "journey"):
    sys.path.insert(0, str(Path(__file__).parent / folder))

import hypothesis
import pytest

hypothesis.settings.register_profile("surefoot", deadline=None)  # a busy machine is no failure
hypothesis.settings.load_profile("surefoot")

SHARED = Path(__file__).parent.parent.parent / "shared"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    """Encoded datasets of tests go to a temporary folder, never to the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def shared():
    """The folder of real models and datasets beside the checkout."""
    if not SHARED.is_dir():
        pytest.skip("needs ../shared, the folder of real models and datasets")
    return SHARED
