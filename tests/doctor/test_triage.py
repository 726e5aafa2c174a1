"""Logs with a known first cause and healthy ones, each inside 10,000 lines that a real run on a CPU printed."""

from __future__ import annotations

import io
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from moekit.doctor.causes import PRECEDENCE, causes
from moekit.doctor.evidence import Log
from moekit.doctor.report import of_logs
from moekit.doctor.triage import Triage, read_log
from moekit.recipe.load import sections

DATA = Path(__file__).parent / "data"
NOISE = (DATA / "noise.log").read_bytes().splitlines()
CASES: list[dict[str, Any]] = yaml.safe_load((DATA / "cases.yaml").read_text())
HEALTHY: list[str] = yaml.safe_load((DATA / "healthy.yaml").read_text())
CASCADES: list[dict[str, Any]] = yaml.safe_load((DATA / "cascades.yaml").read_text())
LINES = 10_000
TRAINING = next(at for at, line in enumerate(NOISE) if b"elapsed time per iteration" in line)
"""From this line on the noise is training."""


@cache
def noise() -> tuple[bytes, ...]:
    """10,000 lines: the start once, the training again and again."""
    steps = NOISE[TRAINING:]
    return (*NOISE[:TRAINING], *(steps * (LINES // len(steps) + 1)))[:LINES]


def log_with(lines: list[str], at: int, on: int = LINES) -> bytes:
    """The noise up to line `on`, with others put in before line `at`."""
    said = [line.encode() for line in lines]
    return b"\n".join([*noise()[:at], *said, *noise()[at:on]]) + b"\n"


def read(text: bytes, resumed: bool = False) -> Triage:
    return read_log(io.BytesIO(text), resumed)


def first_cause(triage: Triage) -> str:
    return triage.found[0].key if triage.found else ""


@pytest.mark.parametrize("case", CASES, ids=[f"{at}-{case['cause']}" for at, case in enumerate(CASES)])
def test_a_log_with_a_cause_says_it(case: dict[str, Any]) -> None:
    """It ends the training, so the steps are before it; what comes after are timers and the like."""
    triage = read(log_with(case["lines"], LINES), case.get("resumed", False))
    assert first_cause(triage) == case["cause"]
    hit = triage.found[0]
    assert hit.line_number > LINES
    assert hit.line in [line.strip() for line in case["lines"]]
    assert triage.lines == LINES + len(case["lines"])


def test_the_cases_are_many_and_public() -> None:
    assert {case["cause"] for case in CASES} == set(causes()) - {"watchdog_report"}  # comes with a time-out
    public = sum("#" in case["from"] for case in CASES)
    print(f"{public} of {len(CASES)} cases are public, of {len(causes())} causes")
    assert public * 2 >= len(CASES) >= 60
    assert sum(len(line) for line in noise()) > 500_000


def test_healthy_logs_are_silent() -> None:
    """As many as there are cases; the noise alone is one of them."""
    assert len(HEALTHY) >= len(CASES)
    alarms = {
        line: first_cause(triage) for line in ["", *HEALTHY] if (triage := read(log_with([line], LINES // 2))).found
    }
    print(f"false alarms: {len(alarms)} of {len(HEALTHY) + 1} healthy logs")
    assert alarms == {}


def test_all_healthy_lines_together_are_silent() -> None:
    assert read(log_with(HEALTHY, LINES)).found == []


@pytest.mark.parametrize("block", [7, 1000])
def test_blocks_may_end_anywhere(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(case for case in CASES if case["cause"] == "host_memory")
    text = log_with(case["lines"], 300, 600)
    whole = read(text)
    monkeypatch.setattr("moekit.doctor.triage._BLOCK_BYTES", block)
    parts = read(text)
    assert (parts.lines, parts.last_progress) == (whole.lines, whole.last_progress)
    assert [(hit.key, hit.line_number, hit.count) for hit in parts.found] == [
        (hit.key, hit.line_number, hit.count) for hit in whole.found
    ]


WATCHDOG = (
    "[rank{rank}]:[E1130 10:00:00.1 ProcessGroupNCCL.cpp:616] [PG ID 0 PG GUID 0(default_pg) Rank {rank}] Watchdog"
    " caught collective operation timeout: WorkNCCL(SeqNum={seq}, OpType=ALLREDUCE, Timeout(ms)=600000)"
    " ran for 600012 milliseconds before timing out."
)
REPORT = (
    "[rank{rank}]:[E1130 10:00:00.1 ProcessGroupNCCL.cpp:1683] [PG ID 0 PG GUID 0(default_pg) Rank {rank}] Exception"
    " (either an error or timeout) detected by watchdog at work: {seq}, last enqueued NCCL work: {seq}, last completed"
    " NCCL work: {done}."
)
ECC = "n7 kernel: NVRM: Xid (PCI:0000:97:00): 48, pid=4711, name=python, DBE (double bit error) ECC"
OOM = "[rank5]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."


def flood(ranks: list[int], done: dict[int, int] | None = None) -> list[str]:
    of = done or {}
    lines = [WATCHDOG.format(rank=rank, seq=of.get(rank, 99) + 1) for rank in ranks]
    return lines + [REPORT.format(rank=rank, seq=of.get(rank, 99) + 1, done=of.get(rank, 99)) for rank in ranks]


def test_a_gpus_fault_is_before_the_flood_that_it_brings_wherever_it_stands() -> None:
    ranks = list(range(4096))
    triage = read(log_with([*flood(ranks), ECC], LINES))
    assert first_cause(triage) == "gpu_ecc"
    flooded = triage.hits["watchdog_timeout"]
    assert (flooded.count, len(flooded.ranks)) == (4096, 4096)
    (finding,) = of_logs([Log(1, Path("attempts/1/train.log"), triage)])
    assert finding.key == "gpu_ecc"
    assert finding.sure == "sure"
    assert any(text.startswith("ranks waited") for text in finding.follows)


@pytest.mark.parametrize("case", CASCADES, ids=[f"{at}-{case['cause']}" for at, case in enumerate(CASCADES)])
def test_of_a_cause_and_what_comes_of_it_the_cause_is_told(case: dict[str, Any]) -> None:
    """Also where a GPU's fault is printed some steps before all others stop."""
    steps = [line.decode() for line in NOISE[TRAINING:] if b"elapsed time per iteration" in line][:3]
    said: list[str] = []
    for line in case["lines"]:
        said += {"<steps>": steps, "<flood>": flood([rank for rank in range(16) if rank != 6])}.get(line, [line])
    triage = read(log_with(said, 3000, 3000))
    assert first_cause(triage) == case["cause"]
    assert len(of_logs([Log(1, Path(), triage)])) == 1


def test_out_of_memory_is_before_the_flood() -> None:
    gone = "[rank1]: torch.distributed.DistBackendError: NCCL error in: X.cpp:1, ncclRemoteError: remote process exited"
    triage = read(log_with([gone, *flood([0, 1, 2, 3]), OOM], LINES))
    assert first_cause(triage) == "gpu_memory"
    assert triage.found[0].ranks == {5}


def test_a_killed_rank_is_before_those_that_lost_it() -> None:
    """As a real run on two nodes printed it."""
    lost = "[rank1]: RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:44423."
    killed = (
        "E1130 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: -9) local_rank: 0 (pid: 4129)"
    )
    triage = read(log_with([lost, killed, "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:"], LINES))
    assert [hit.key for hit in triage.found] == ["rank_killed", "nccl_remote", "task_failed"]


def test_the_rank_with_the_oldest_completed_collective_is_named() -> None:
    triage = read(log_with(flood(list(range(16)), {11: 42}), LINES))
    assert first_cause(triage) == "watchdog_timeout"
    said = triage.collectives.sentence()
    assert said == "rank 11 had completed collective 42 of group `default_pg`, the others up to 99"


def test_groups_of_one_name_are_not_compared_with_each_other() -> None:
    """As torch 2.5 and newer say it; expert parallel groups have each their own numbers."""
    said = (
        "[rank{rank}]:[E1130 ProcessGroupNCCL.cpp:1809] [PG ID 12 PG GUID {guid}(EXPERT_MODEL_PARALLEL_GROUP) Rank 0]"
        "  failure detected by watchdog at work sequence id: 9 PG status: last enqueued work: 9,"
        " last completed work: {n}"
    )
    one = [said.format(rank=rank, guid=50, n=1570) for rank in (0, 1)]
    other = [said.format(rank=rank, guid=51, n=1579 - (rank == 3)) for rank in (2, 3)]
    sentence = read(log_with([*one, *other], LINES)).collectives.sentence()
    assert sentence.startswith("rank 3 had completed collective 1578 of group `EXPERT_MODEL_PARALLEL_GROUP 51`")
    assert read(log_with(one, LINES)).collectives.sentence() == ""


def test_where_lines_name_no_group_that_is_said() -> None:
    """As torch 2.2 and older print it, without a report that names one."""
    said = (
        "[E ProcessGroupNCCL.cpp:481] [Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={n},"
    )
    lines = [f"{said.format(rank=rank, n=20 - (rank == 2))} OpType=ALLREDUCE) ran for 9 ms." for rank in range(4)]
    lines += [f"{said.format(rank=9, n=5)} OpType=ALLTOALL_BASE) ran for 9 ms."]
    sentence = read(log_with(lines, LINES)).collectives.sentence()
    assert sentence.startswith("rank 2 had completed collective 18, others up to 19, if they are of one group")


def test_a_rank_that_says_nothing_is_named() -> None:
    triage = read(log_with(flood([rank for rank in range(16) if rank != 6]), LINES))
    assert triage.collectives.sentence(16).startswith("rank 6 completed nothing that its watchdog told of")
    assert triage.collectives.sentence() == ""


def test_one_node_of_sixteen_on_sockets_is_named_with_what_was_missing() -> None:
    fine = [f"n{node}:93:128 [0] NCCL INFO Using network AWS Libfabric" for node in range(16)]
    fine[9] = "n9:93:128 [0] NCCL INFO Using network Socket"
    abi = (
        "n9:93:128 [0] NCCL INFO NET/Plugin: dlerror=libfabric.so.1: version `FABRIC_1.7' not found, using internal"
        " implementation"
    )
    triage = read(log_with([*fine, abi], 900))
    (finding,) = of_logs([Log(1, Path("attempts/1/train.log"), triage)])
    assert finding.key == "fabric_abi"
    assert "FABRIC_1.7" in finding.shown_by[0]
    assert list(triage.hits["nccl_socket"].hosts) == ["n9"]
    assert finding.follows == ["NCCL moves data over TCP sockets and not over the fabric (line 910)"]


def test_what_makes_a_run_slow_stands_beside_what_ended_it() -> None:
    socket = "n9:93:128 [0] NCCL INFO Using network Socket"
    triage = read(log_with([socket, *log_with([OOM], 100, 100).decode().splitlines()], 900, 900))
    assert [one.key for one in of_logs([Log(1, Path(), triage)])] == ["gpu_memory", "nccl_socket"]


def test_an_exception_that_training_went_on_after_is_none() -> None:
    caught = ["Traceback (most recent call last):", "ValueError: could not parse the answer"]
    assert read(log_with(caught, LINES // 2)).found == []
    assert first_cause(read(log_with(caught, LINES))) == "exception"


def test_a_cause_that_training_went_on_after_is_said_with_that() -> None:
    triage = read(log_with(["OSError: [Errno 28] No space left on device"], LINES // 2))
    (finding,) = of_logs([Log(1, Path(), triage)])
    assert finding.sure == "possible"
    assert "training went on after it" in finding.shown_by


def test_a_start_from_random_is_a_fault_of_resumed_attempts_alone() -> None:
    lines = ["    will not load any checkpoints and will start from random"]
    assert read(log_with(lines, LINES)).found == []
    assert first_cause(read(log_with(lines, LINES), resumed=True)) == "random_start"


def test_a_line_without_end_takes_no_memory() -> None:
    class Endless(io.RawIOBase):
        left = 200

        def read(self, size: int = -1) -> bytes:
            self.left -= 1
            return b"x" * size if self.left > 0 else b""

    triage = read_log(Endless())  # type: ignore[arg-type]
    assert triage.lines == 1
    assert triage.bytes == 199 << 20


def test_what_is_no_text_is_read_over() -> None:
    assert read(bytes(range(256)) * 100 + b"\n" + OOM.encode()).found[0].key == "gpu_memory"
    assert read(b"").found == []


# The causes as data


@pytest.mark.parametrize("cause", causes().values(), ids=list(causes()))
def test_a_cause_is_whole(cause: Any) -> None:
    assert cause.tier in (*PRECEDENCE, "drag")
    assert set(cause.explains) <= set(causes()) - {cause.key}
    for text in (cause.cause, cause.more, cause.remedy):
        assert text
        assert text == text.strip()
        assert not text.endswith(".")
    for said in cause.says:
        re.compile(said.encode())
    names = {f"{section}.{name}" for section, cls in sections() for name in cls.__annotations__}
    for section, field in re.findall(r"`([a-z]+)\.([a-z_0-9]+)[:`]", f"{cause.more} {cause.remedy}"):
        assert f"{section}.{field}" in names


@pytest.mark.megatron
def test_megatrons_messages_are_in_its_source() -> None:
    import megatron.core

    root = Path(megatron.core.__file__).parents[1]
    source = "".join(path.read_text(encoding="utf-8", errors="replace") for path in root.rglob("*.py"))
    texts = {cause.key: cause.text for cause in causes().values() if cause.text}
    assert len(texts) >= 18
    assert {key: text for key, text in texts.items() if text not in source} == {}
    assert "successfully saved" in source
    assert "elapsed time per iteration" in source
