"""Lines are told apart by texts that expressions cannot do without: no line that one matches is passed over."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
import yaml

from moekit.doctor.causes import patterns
from moekit.doctor.needles import DIGITS, needles
from moekit.doctor.triage import _expressions, read_log

DATA = Path(__file__).parent / "data"
LINES = [
    *(line.encode() for case in yaml.safe_load((DATA / "cases.yaml").read_text()) for line in case["lines"]),
    *(line.encode() for line in yaml.safe_load((DATA / "healthy.yaml").read_text())),
    *(DATA / "noise.log").read_bytes().splitlines(),
]


def test_nothing_that_an_expression_matches_is_passed_over() -> None:
    """Against trying each of them on each line."""
    found, _, texts = _expressions()
    each = [re.compile(text.encode()) for _, text in texts]
    matches = 0
    for line in LINES:
        within = set(found.within(line))
        matching = {number for number, pattern in enumerate(each) if pattern.search(line)}
        assert matching <= within, line
        assert not matching or found.kinds([line.translate(None, DIGITS)]), line
        matches += len(matching)
    assert matches > len(yaml.safe_load((DATA / "cases.yaml").read_text()))


def test_few_lines_of_a_real_run_are_looked_at_closely() -> None:
    found, _, _ = _expressions()
    noise = (DATA / "noise.log").read_bytes().splitlines()
    assert sum(bool(found.within(line)) for line in noise) < len(noise) / 10


@pytest.mark.parametrize(
    ("expression", "match"),
    [
        ("GPU has fallen", "GPU has fallen"),
        (r"[Uu]ncorrectable (?:ECC|DRAM) error", "uncorrectable DRAM error"),
        (r"exitcode\s*: -(?:11|6)\b", "exitcode  : -6"),
        (r"(?:srun|sbatch): (?:error|fatal): x", "sbatch: fatal: x"),
        (r"(?<!no )(?:Xid \(PCI[^)]*\)|Xid error){1,2}: \d+", "Xid (PCI:1): 7"),
        (r"a?b*quota exceeded|over quota", "over quota"),
    ],
)
def test_texts_of_an_expression(expression: str, match: str) -> None:
    found = needles([r"nothing\w+here", expression])
    assert re.search(expression, match)
    assert found.within(f"before {match} behind".encode()) == [1]
    assert found.kinds([f"before {match}".encode().translate(None, DIGITS), b"another line"])
    assert found.within(b"a line that has none of it") == []


@pytest.mark.parametrize("expression", [r"\d+ \w+", "a|quota", "(?:ab)?", "[a-z]{9}"])
def test_an_expression_without_a_text_is_refused(expression: str) -> None:
    with pytest.raises(ValueError, match="no text is in all that"):
        needles([expression])


def test_every_cause_has_its_texts() -> None:
    """Each alone, so that a message names it."""
    for _, said in patterns():
        needles([said])


def test_numbers_decide_where_they_are_what_a_line_says() -> None:
    """Lines that differ in digits alone, the harmless ones first."""
    log = b"exit code 1000\nexit code 137\nNVRM: Xid (PCI:0000:1): 31, x\nNVRM: Xid (PCI:0000:2): 79, x\n"
    assert set(read_log(io.BytesIO(log)).hits) == {"rank_killed", "gpu_application_fault", "gpu_off_bus"}
