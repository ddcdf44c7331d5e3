"""The test modules that ``make check`` leaves out, so that it ends in two minutes.

``python tests/slow.py RESULTS.xml`` chooses them by the times of ``pytest --junitxml RESULTS.xml``:
those whose cases take the longest, until the rest fits.
"""

import sys
import xml.etree.ElementTree as ET
from collections import defaultdict
from pathlib import Path

TESTS = Path(__file__).parent
LIST = TESTS / "slow.txt"
SECONDS = 100  # of one core, for what is left


def slowest(results):
    """Paths of modules below ``tests``, from the XML file ``results``."""
    seconds = defaultdict(list)
    for case in ET.parse(results).iter("testcase"):
        if module := case.get("classname").removeprefix("tests."):  # else it was not collected
            seconds[module].append(float(case.get("time")))
    total, chosen = 0.0, []
    for module in sorted(seconds, key=lambda name: sum(seconds[name]) / len(seconds[name])):
        total += sum(seconds[module])
        if total > SECONDS:
            chosen.append(f"{module.replace('.', '/')}.py")
    return sorted(chosen)


if __name__ == "__main__":
    LIST.write_text("\n".join(slowest(sys.argv[1])) + "\n")
