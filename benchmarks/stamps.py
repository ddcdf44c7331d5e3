"""How long a start looks at the pictures of rows that are in the cache, beside ``os.lstat`` alone.

    .venv/bin/python benchmarks/stamps.py [--pictures 1000000] [--repetitions 3]

The goal is 30 seconds for a million. The files are empty: what is measured reads none of them.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import xxhash
from measure import interleaved, machine, ratio, say, spread, table

from surefoot.data.media import stamps
from surefoot.data.media.files import MediaFiles
from surefoot.data.section import MediaSection

TITLES = {"lstat": "`os.lstat` of each (limit)", "surefoot": "Surefoot, nothing changed"}


def main() -> None:
    """Make the files, look at them in turns, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=int, default=1_000_000)
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args()
    print(f"{machine()}; {options.pictures:,} pictures")
    nothing = xxhash.xxh3_64_hexdigest(b"")
    digests = {f"{n // 1000}/{n}.png": nothing for n in range(options.pictures)}
    with (
        tempfile.TemporaryDirectory(dir=".") as folder,
        patch.object(stamps, "_digests", lambda _: digests),
    ):
        say("making the files")
        for name in digests:
            path = Path(folder, name)
            path.parent.mkdir(exist_ok=True)
            path.touch()
        time.sleep(3)  # times that are younger are not believed
        media = MediaFiles(
            MediaSection(), Path(folder).absolute(), Path(folder).absolute() / "cache"
        )
        store = SimpleNamespace(content="content")

        def look() -> None:
            if (changed := stamps.first_changed(media, store)) is not None:
                raise SystemExit(f"{changed} is taken for another picture")

        def lstat() -> None:
            for name in digests:
                os.lstat(f"{folder}/{name}")

        look()  # the first one reads and remembers
        found: dict[str, list[float]] = {subject: [] for subject in TITLES}
        for subject in interleaved(list(TITLES), options.repetitions):
            say(subject)
            began = time.monotonic()
            (look if subject == "surefoot" else lstat)()
            found[subject].append(time.monotonic() - began)
    rows = [
        [TITLES[subject], spread(seconds), ratio(seconds, found["lstat"])]
        for subject, seconds in found.items()
    ]
    print(table(["looking at all pictures", "seconds", "of the limit's speed"], rows))


if __name__ == "__main__":
    main()
