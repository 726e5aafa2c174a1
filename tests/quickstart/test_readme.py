"""The README's first run is what a first run prints, numbers, times and drawings aside."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from launched import Launched

README = Path(__file__).parents[2] / "README.md"

pytestmark = [pytest.mark.megatron, pytest.mark.train, pytest.mark.timeout(4000)]


def masked(line: str) -> str:
    """A line without what differs between two runs: their names and folders, numbers, and what is drawn."""
    line = re.sub(r"\S*moekit-local/", "moekit-local/", line)
    line = re.sub(r"\S*bin/|recipes/|\.yaml", "", line.replace("trained", "quickstart"))
    line = re.sub(r"[\u2800-\u28ff\u2581-\u2588·◆│┤└─][\s\u2800-\u28ff\u2581-\u2588·◆│┤└─]*", "~ ", line)
    return re.sub(r"[\d.,:]*\d[\d.,:]*", "#", " ".join(line.split()))


def test_the_readmes_first_run_is_a_real_one(trained: Launched, root: Path) -> None:
    (shown,) = re.findall(r"\$ make quickstart\n(.*?)```", README.read_text(), re.DOTALL)
    real = [masked(line) for line in trained.text.splitlines()]
    # only the first launch of all tests has found no data yet
    data = {masked(line) for file in root.glob("*.out") for line in file.read_text().splitlines() if "  data " in line}
    rest = iter(real)  # each line is looked for behind the one before
    for line in filter(str.strip, shown.splitlines()):
        if line.strip() != "...":
            assert masked(line) in (data if "  data " in line else rest), f"no run prints, here: {line}"
