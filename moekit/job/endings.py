"""How an attempt ended, from what its ranks, torchrun and srun left in `attempts/N/`.

No exit code of torchrun or srun says it (a worker's 16 arrives as 1): each rank writes `exit/rankR.json` (`exits.py`),
and a rank without one was killed. It runs outside the training processes, where no package is.
"""

from __future__ import annotations

import json
import os
import re
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STOPPED = (128 + 2, 128 + 15)
"""Exit codes of ranks that were stopped by SIGINT or SIGTERM: never a cause, torchrun stops the others so."""

GAVE_UP = "SystemExit: None"
"""Where Megatron has nothing to start from it prints why and leaves without a code, which Python makes 0."""

RERUN, INVALID = 16, 17
"""Megatron's exit codes for a step to be run again on another GPU, and for one whose result was found to be wrong
(megatron/core/rerun_state_machine.py:37-40 of 0.19.2)."""

_ILLEGAL_INSTRUCTION = (128 + 4, -4)
_TAKEN = "Slurm took its nodes: preempted, requeued, cancelled, at its time limit, or its first node failed"
_LOG_TAIL_BYTES = 16 << 20
_METRICS_TAIL_BYTES = 8192
_CONSEQUENCE = re.compile(r"connection|peer|socket|broken pipe|timed? ?out|nccl|gloo|store", re.IGNORECASE)
"""What ranks say whose other end is gone."""
_OUT_OF_MEMORY = re.compile(r"OutOfMemoryError|CUDA out of memory|can't allocate memory|MemoryError|oom_kill")


@dataclass(frozen=True)
class Ending:
    """How an attempt ended."""

    kind: str
    """`ended` (all ranks came to their end by themselves), `stopped` (SIGTERM or SIGINT), `lost` (Slurm took the nodes,
    or no rank came to say anything), `killed` (a rank by SIGKILL), `rerun` (16), `invalid` (17), `out_of_memory`,
    `illegal_instruction`, `arguments` (Megatron refuses them), `gave_up` (Megatron had nothing to load), `refused`
    (the nodes or their network are not fit for training), `failed`."""
    sentence: str
    """What broke first, as far as files tell."""
    ranks: tuple[int, ...] = ()
    """The ranks it began with."""


def exit_records(attempt: Path) -> dict[int, dict[str, Any]]:
    """`exit/rankR.json` by rank (`moekit/job/exits.py`); a rank without a whole one is running or was killed."""
    found = {}
    for path in sorted((attempt / "exit").glob("rank*.json")):
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            record = json.loads(path.read_text())
            found[int(path.stem[len("rank") :])] = {
                "code": int(record["code"]),
                "reason": str(record.get("reason", "")),
                "time": float(record.get("time") or 0),
            }
    return found


def refusal(attempt: Path) -> dict[str, Any]:
    """Why an attempt's nodes were refused, as `sentence`, and which are to blame, as `bad`; empty where none were.

    `preflight/` wrote it, before the training or beside it.
    """
    with suppress(OSError, ValueError):
        said = json.loads((attempt / "refused.json").read_text())
        if isinstance(said, dict):
            return said
    return {}


def ended_well(attempt: Path, world: int) -> bool:
    """Whether every rank came to its end by itself."""
    records = exit_records(attempt)
    return len(records) == world and all(
        record["code"] == 0 and record["reason"] != GAVE_UP for record in records.values()
    )


def first_cause(attempt: Path, world: int) -> str:
    """One sentence: what broke first, as far as the files tell."""
    return ending(attempt, world).sentence


def ending(attempt: Path, world: int, taken: bool = False, srun_code: int = 0) -> Ending:
    """How an attempt of `world` ranks ended; `taken`: the batch shell did not live to see srun's exit code."""
    if refused := refusal(attempt).get("sentence"):
        return Ending("refused", str(refused))
    records = exit_records(attempt)
    text = _tail(attempt / "train.log", _LOG_TAIL_BYTES)
    killed = killed_ranks(text)
    if ended_well(attempt, world):
        return Ending("ended", "all ranks came to their end")
    if any(record["reason"] == GAVE_UP for record in records.values()):
        said = re.findall(r"^>> (.*?)(?: <<)?$", text, re.MULTILINE)
        return Ending("gave_up", f"Megatron left without training{': ' + said[-1] if said else ''}")
    if taken and _only_heard(records):
        return Ending("lost", _TAKEN)
    return (
        _validation(records, text)
        or _broken(records, killed, text, world)
        or _gone(records, text, world, taken, srun_code)
    )


def _only_heard(records: dict[int, dict[str, Any]]) -> bool:
    """Whether those ranks that failed did so because others were gone, or what they write to."""
    failed = [record for record in records.values() if record["code"] not in (0, *STOPPED)]
    return bool(failed) and all(_CONSEQUENCE.search(record["reason"]) for record in failed)


def _validation(records: dict[int, dict[str, Any]], text: str) -> Ending | None:
    """Megatron found a result that cannot be right, and says what is to be done."""
    suspects = tuple(dict.fromkeys(int(rank) for rank in re.findall(r"Rank (\d+), node .*First rerun: .*", text)))
    for code, kind in ((INVALID, "invalid"), (RERUN, "rerun")):
        if any(record["code"] == code for record in records.values()):
            found = not_a_number(text) or _same_gpu(text) or "Megatron found a result that cannot be right"
            return Ending(kind, f"{found}, exit {code}", suspects)
    failed = any(record["code"] not in (0, *STOPPED) for record in records.values())
    if failed and (found := not_a_number(text)):
        return Ending("failed", found, suspects)
    return None


def _same_gpu(text: str) -> str:
    """That a rank which was to repeat a step on another GPU had the same one (rerun_state_machine.py:647 of 0.19.2)."""
    found = re.search(r"Got rescheduled on the same GPU.*\(node: (\S+), gpu: (\d+)\)", text)
    return f"a step was to be repeated on another GPU than {found[2]} of {found[1]}, and was not" if found else ""


def _broken(records: dict[int, dict[str, Any]], killed: dict[int, int], text: str, world: int) -> Ending | None:
    """A rank that failed, or was killed by something else than its node's end."""
    failed = sorted((record["time"], rank) for rank, record in records.items() if record["code"] not in (0, *STOPPED))
    out = [rank for _, rank in failed if _OUT_OF_MEMORY.search(records[rank]["reason"])]
    if out:
        return Ending(
            "out_of_memory", f"rank {out[0]} ran out of memory: {_line(records[out[0]]['reason'])}", (out[0],)
        )
    for rank, code in killed.items():
        if code in _ILLEGAL_INSTRUCTION:
            what = "the processor or GPU does not know an instruction of the image's libraries (exit 132)"
            return Ending("illegal_instruction", f"rank {rank}: {what}", (rank,))
    by_kernel = "oom_kill" in text
    dead = [rank for rank, code in killed.items() if code == -9 and rank not in records]
    if not dead and "Signal 9 (SIGKILL)" in text:
        dead = [rank for rank in range(world) if rank not in records]
    if dead and by_kernel:
        return Ending("out_of_memory", f"rank {dead[0]} was killed: its node was out of memory", (dead[0],))
    if dead:
        what = f"rank {dead[0]} was killed (SIGKILL): most often the machine was out of memory"
        return Ending("killed", what, (dead[0],))
    crashed = [(rank, code) for rank, code in killed.items() if code < 0 and code not in (-2, -9, -15)]
    if crashed:
        rank, code = crashed[0]
        return Ending("failed", f"rank {rank} was ended by signal {-code} ({signal.strsignal(-code)})", (rank,))
    silent = [rank for rank in range(world) if rank not in records]
    if silent and _only_heard(records):
        heard = f"rank {failed[0][1]}: {_line(records[failed[0][1]]['reason'])}"
        return Ending("lost", f"rank {silent[0]} ended without a word ({heard})", (silent[0],))
    if failed:
        rank = failed[0][1]
        reason = _line(records[rank]["reason"])
        refusal = re.search(r"^\S+: error: (.*)$", text, re.MULTILINE)  # argparse, which exits with 2
        if reason == "SystemExit: 2":
            return Ending("arguments", f"Megatron refuses its arguments{': ' + refusal[1] if refusal else ''}", (rank,))
        return Ending("failed", f"rank {rank}: {reason}", (rank,))
    return None


def _gone(records: dict[int, dict[str, Any]], text: str, world: int, taken: bool, srun_code: int) -> Ending:
    """Nobody failed: all were told to end, or taken away."""
    node = re.search(r"Node failure on (\S+)", text)
    if node:
        return Ending("lost", f"node {node[1]} failed")
    if taken:
        return Ending("lost", _TAKEN)
    if srun_code == 128 + 9 and len(records) < world:
        return Ending("lost", "srun was killed (SIGKILL)")
    if records and all(record["code"] in (0, *STOPPED) for record in records.values()):
        if len(records) == world:
            return Ending("stopped", "its ranks were told to end (SIGTERM) and did not save")
        missing = [rank for rank in range(world) if rank not in records]
        return Ending("killed", f"rank {missing[0]} ended without a word, the others were told to end", (missing[0],))
    said = first_error(text) or "it ended without a word"
    return Ending("failed", said)


def killed_ranks(text: str) -> dict[int, int]:
    """The exit codes that torchrun prints of its ranks, those below zero being signals; the first it saw is last."""
    found = re.findall(r"rank\s*: (\d+) \(local_rank: \d+\)\s+exitcode\s*: (-?\d+)", text)
    return {int(rank): int(code) for rank, code in reversed(found)}


def first_error(text: str) -> str:
    """The last line of the first Python traceback in `text`, else its last line; empty for an empty text."""
    lines = [line for line in text.splitlines() if line.strip()]
    for number, line in enumerate(lines):
        if "Traceback (most recent call last):" in line:
            after = (later for later in lines[number + 1 :] if not later.startswith(" "))
            return next(after, line).strip()
    return lines[-1].strip() if lines else ""


def not_a_number(text: str) -> str:
    """What Megatron's check found that is no number, from a log; it then goes on to other failures, or saves to None.

    megatron/core/rerun_state_machine.py of 0.19.2, `validate_result`.
    """
    found = re.search(r"Unexpected result (\S+) on rank (\d+) at iteration .*\(message='([^']*)'\)", text)
    return f"rank {found[2]}: {found[3]} (it is {found[1]})" if found else ""


def last_saved(attempt: Path) -> int:
    """The step of the last checkpoint that Megatron says it saved; 0 for none (megatron/training/checkpointing.py)."""
    text = _tail(attempt / "train.log", _LOG_TAIL_BYTES)
    steps = re.findall(r"successfully saved checkpoint from iteration +(\d+)", text)
    return int(steps[-1]) if steps else 0


def last_step(metrics: str | Path) -> int:
    """The step of the last whole line of a `metrics.jsonl` that has one; 0 without."""
    tail = _tail(Path(metrics), _METRICS_TAIL_BYTES)
    for line in reversed(tail[: tail.rfind("\n") + 1].splitlines()):
        with suppress(ValueError, TypeError):
            said = json.loads(line)
            if isinstance(said, dict) and "step" in said:
                return int(said["step"])
    return 0


def _tail(path: Path, size: int) -> str:
    """The last `size` bytes of a file; empty where there is none."""
    with suppress(OSError), path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - size))
        return file.read().decode(errors="replace")
    return ""


def _line(reason: str) -> str:
    lines = reason.strip().splitlines()
    return lines[0] if lines else "no reason"
