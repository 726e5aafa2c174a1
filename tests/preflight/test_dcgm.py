"""What `dcgmi diag` prints, whole and damaged."""

from pathlib import Path

import pytest
from gpu_double import diag_json

from moekit.job.preflight.dcgm import Diag, read_diag

SAMPLES = Path(__file__).parent / "samples"
PERSISTENCE = "software on GPU 0: Persistence Mode: Persistence mode for GPU 0 is disabled."


def sample(name: str) -> str:
    return (SAMPLES / name).read_text()


@pytest.mark.parametrize("kind", ["json", "txt"])
def test_a_node_that_passes(kind: str) -> None:
    assert read_diag(sample(f"dcgmi-diag-r1-v4-pass.{kind}"), 0) == Diag("passed")


def test_json_says_that_a_setting_is_no_broken_gpu() -> None:
    diag = read_diag(sample("dcgmi-diag-r1-v4-persistence-fail.json"), 226)
    assert (diag.state, diag.is_setting, len(diag.said)) == ("failed", True, 8)
    assert diag.said[0] == PERSISTENCE


def test_the_tables_cut_warnings_are_whole_again() -> None:
    """It tells no severity; what is known to be a setting is one all the same."""
    diag = read_diag(sample("dcgmi-diag-r1-v4-persistence-fail.txt"), 226)
    assert (diag.state, diag.is_setting, len(diag.said)) == ("failed", True, 8)
    assert diag.said[0] == PERSISTENCE


def test_a_broken_gpu() -> None:
    diag = read_diag(diag_json({3: "GPU 3 has 4 uncorrectable memory errors"}), 226)
    assert diag == Diag("failed", ("software on GPU 3: GPU 3 has 4 uncorrectable memory errors",))
    mixed = read_diag(diag_json({3: "broken"}).replace('"error_severity": 2', '"error_severity": 5'), 226)
    assert mixed.is_setting


VERSION_3 = """{"DCGM GPU Diagnostic": {"test_categories": [
 {"category": "Deployment", "tests": [
  {"name": "Denylist", "results": [{"gpu_ids": "0,1", "status": "Pass"}]},
  {"name": "PCIe", "results": [{"gpu_id": "0", "status": "Skip"}, {"gpu_id": "1", "status": %s}]}]}]}}"""


@pytest.mark.parametrize(
    ("result", "code", "diag"),
    [
        ('"Pass"', 0, Diag("passed")),
        ('"Fail", "warnings": "slow\\n link"', 226, Diag("failed", ("PCIe on GPU 1: slow link",))),
        ('"Fail", "warnings": ["a", "b"]', 226, Diag("failed", ("PCIe on GPU 1: a; b",))),
        ('"Pass", "warnings": [{"warning": "hot"}]', 0, Diag("warned", ("PCIe on GPU 1: hot",))),
        ('"Warn"', 0, Diag("warned", ("PCIe on GPU 1: warn",))),
    ],
)
def test_json_of_version_3(result: str, code: int, diag: Diag) -> None:
    assert read_diag(VERSION_3 % result, code) == diag


TABLE_3 = """Successfully ran diagnostic for group.
+---------------------------+------------------------------------------------+
| Diagnostic                | Result                                         |
+===========================+================================================+
|-----  Deployment  --------+------------------------------------------------|
| Denylist                  | Pass                                           |
+-----  Integration  -------+------------------------------------------------+
| PCIe                      | Fail - GPU: 2                                  |
| Warning                   | GPU 2 runs at PCIe generation 1, below the     |
|                           | minimum of 3                                   |
| Memory                    | Skip - All                                     |
+---------------------------+------------------------------------------------+
"""


def test_the_table_of_version_3() -> None:
    said = "PCIe on GPU 2: GPU 2 runs at PCIe generation 1, below the minimum of 3"
    assert read_diag(TABLE_3, 226) == Diag("failed", (said,))


def test_all_skipped_is_no_pass() -> None:
    text = diag_json({}).replace('"Pass"', '"Skip"')
    assert read_diag(text, 0) == Diag("skipped", ("every test was skipped",))


@pytest.mark.parametrize(
    ("text", "code", "state", "said"),
    [
        (
            "Error: unable to establish a connection to the specified host: localhost",
            235,
            "no_daemon",
            "no DCGM daemon",
        ),
        ("Error: Unable to connect to host engine. Host engine connection invalid/disconnected.", 1, "no_daemon", "no"),
        ("", 127, "not_run", "there is no `dcgmi`"),
        ("", 204, "not_run", "its test program is missing"),
        ("", 203, "not_run", "its test program was killed"),
        ("", None, "not_run", "it did not end in time"),
        (
            '{"DCGM Diagnostic": {"version": "4.4.2", "runtime_error": "no GPU in group"}}',
            1,
            "not_run",
            "no GPU in group",
        ),
        ("Segmentation fault", 139, "not_run", "exit code 139: Segmentation fault"),
        ("", 0, "not_run", "its output is none that can be read"),
        ("", 226, "failed", "a test failed, by exit code 226"),
        ("", 205, "failed", "the GPU is to be isolated"),
    ],
)
def test_what_is_no_result(text: str, code: int | None, state: str, said: str) -> None:
    diag = read_diag(text, code)
    assert diag.state == state
    assert said in diag.said[0]


@pytest.mark.parametrize("name", ["dcgmi-diag-r1-v4-pass", "dcgmi-diag-r1-v4-persistence-fail"])
@pytest.mark.parametrize("kind", ["json", "txt"])
@pytest.mark.parametrize("code", [0, 226])
def test_no_damage_makes_a_pass_of_a_failure(name: str, kind: str, code: int) -> None:
    """Cut anywhere, it is never a defect; and what ended with 226 never passes."""
    text = sample(f"{name}.{kind}")
    for end in range(0, len(text), 97):
        diag = read_diag(text[:end], code)
        assert diag.state in ("passed", "failed", "not_run"), end
        assert not (code == 226 and diag.state != "failed"), end
        assert not (kind == "json" and end < len(text) - 97 and diag.state == "passed"), end


def test_json_of_other_shapes() -> None:
    for text in (
        '{"DCGM Diagnostic": []}',
        "{}",
        "[1]",
        '{"DCGM Diagnostic": {"test_categories": [1, {"tests": {}}]}}',
    ):
        assert read_diag(text, 0).state == "not_run"
