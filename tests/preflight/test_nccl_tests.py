"""What nccl-tests print, whole and damaged."""

from pathlib import Path

import pytest
from gpu_double import SIZE, alone_text, perf_text

from moekit.job.preflight.nccl_tests import read_perf

SAMPLES = Path(__file__).parent / "samples"
TWO = ("n1", "n2")


def sample(name: str) -> str:
    return (SAMPLES / f"nccl-tests-2.19.6-alltoall_perf-2x8{name}.txt").read_text()


def test_out_of_place_at_the_size_asked_for() -> None:
    text = sample("")
    assert (read_perf(text, 8589934592, TWO, 8).busbw_gb_s, read_perf(text, 1 << 20, TWO, 8).busbw_gb_s) == (
        42.17,
        11.80,
    )


@pytest.mark.parametrize(("nodes", "busbw"), [(2, 77.14), (4, 39.25), (8, 30.91)])
def test_the_handbooks_baselines(nodes: int, busbw: float) -> None:
    hosts = [f"n{node}" for node in range(nodes)]
    assert read_perf(perf_text("alltoall_perf", hosts, busbw), SIZE, hosts, 8).busbw_gb_s == busbw


def test_wrong_values_count_for_nothing() -> None:
    measured = read_perf(sample("-wrong"), 8589934592, TWO, 8, code=1)
    assert (measured.busbw_gb_s, measured.problem) == (0.0, "12 values arrived wrong")


def test_values_must_be_checked() -> None:
    text = perf_text("alltoall_perf", TWO, 77.14).replace("      0 ", "    N/A ")
    assert read_perf(text, SIZE, TWO, 8).problem == "its values were not checked (`-c 1`)"


def test_a_binary_without_mpi() -> None:
    problem = read_perf(alone_text(TWO), SIZE, TWO, 8).problem
    assert problem.startswith("16 processes each say rank 0: each measured alone. The program is built without MPI")


def test_ranks_of_several_nodes_may_share_a_line() -> None:
    text = perf_text("alltoall_perf", TWO, 77.14).replace("NVIDIA H200\n#  Rank  9", "NVIDIA H200#  Rank  9")
    assert read_perf(text, SIZE, TWO, 8).busbw_gb_s == 77.14


def test_ranks_are_where_they_were_asked_for() -> None:
    text = perf_text("alltoall_perf", TWO, 77.14)
    missing = "\n".join(line for line in text.splitlines() if "Rank 15" not in line)
    assert read_perf(missing, SIZE, TWO, 8).problem == "its list has 15 ranks where 2 nodes of 8 GPUs have 16"
    moved = text.replace("Rank 15 Group  0 Pid  41015 on         n2", "Rank 15 Group  0 Pid  41015 on         n1")
    assert read_perf(moved, SIZE, TWO, 8).problem == "its ranks are 9 on n1, 7 on n2"
    assert read_perf(text.replace(" n2 ", " n2.cluster.local "), SIZE, TWO, 8).busbw_gb_s == 77.14


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("", 1, "it ended with 1 at 8589934592 bytes: it printed nothing"),
        ("srun: error: Couldn't find the specified plugin name for mpi/pmix\n", 1, "plugin name for mpi/pmix"),
        ("/usr/bin/bash: /opt/nccl-tests/build/alltoall_perf: No such file or directory\n", 127, "No such file"),
    ],
)
def test_what_is_no_measurement(text: str, code: int, said: str) -> None:
    assert said in read_perf(text, SIZE, TWO, 8, code).problem


def test_a_run_that_fails_after_its_row() -> None:
    text = perf_text("alltoall_perf", TWO, 77.14)
    assert read_perf(text, SIZE, TWO, 8, code=1).problem == "it says FAILED, and ended with 1"


def test_no_damage_makes_another_number() -> None:
    """Cut anywhere, the number is the right one or none."""
    text = perf_text("alltoall_perf", TWO, 77.14)
    for end in range(0, len(text), 13):
        measured = read_perf(text[:end], SIZE, TWO, 8, 0)
        assert measured.busbw_gb_s == 77.14 or measured.problem, end
