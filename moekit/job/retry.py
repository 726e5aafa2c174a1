"""Whether a run goes on, decided from the files of its earlier attempts: `python3 job/retry.py start|end ...`.

`train.sh` runs it on the first node of a job, outside the container, in the run directory:

    start NODE...     before an attempt; the last attempt's batch shell may have died with its node, so this decides
    end CODE NODE...  after the training step has ended with srun's exit code; what comes next is decided once more

Each prints a sentence for people on standard error, and for `train.sh` one word a line on standard output:
`go ATTEMPT ARGV FIRST` (FIRST: which of the nodes gets rank 0), `exit CODE` or `requeue EXCLUDED` (nodes with commas
between, or an empty line).

It reads `retry.json`, `end` and `attempts/`, and writes `attempts/N/decision.json`, `attempts/N/end.json` and
`decision.json`, the last decision. Standard library alone, and Python >= 3.9: the node's own.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

if __package__:
    from . import checkpoints
    from .attempts import Attempt, Facts, new_attempt, numbers, read_attempts, read_facts, read_json
    from .endings import Ending, ending
else:
    import checkpoints  # type: ignore[import-not-found, no-redef]
    from attempts import (  # type: ignore[import-not-found, no-redef]
        Attempt,
        Facts,
        new_attempt,
        numbers,
        read_attempts,
        read_facts,
        read_json,
    )
    from endings import Ending, ending  # type: ignore[import-not-found, no-redef]

MOST_RERUNS = 3
"""Attempts in a row that may end with Megatron's exit 16: it asks for the same step on another GPU, and again
where it got the same one (megatron/core/rerun_state_machine.py:644-651 of 0.19.2)."""
SAME_FAILURE = 3
"""Attempts in a row that may end with the same failure at the same step."""
NO_PROGRESS = 5
"""Attempts in a row that may begin at the same step and leave no newer checkpoint, however they end."""
_ASK_SLURM_S = 20
_FINAL = {
    "invalid": "a step's result was wrong on this GPU, or NaN on two: Megatron found its diagnosis",
    "illegal_instruction": "it would meet the same instruction again: the image is built for another processor or GPU",
    "arguments": "it would refuse them again",
    "out_of_memory": "it would run out again: less per GPU helps, as by `memory.recompute_granularity`",
    "gave_up": "what it was told to load is not there",
}
_OWN_FAILURES = ("failed", "killed")


@dataclass(frozen=True)
class Decision:
    """What comes next."""

    action: str
    """`first` (from the beginning), `resume` (from the checkpoint of `step`), `move` (the same on other nodes),
    `finished`, or `stop`."""
    sentence: str
    step: int = 0
    exclude: tuple[str, ...] = ()
    """Nodes that further attempts stay away from."""
    first: int = 0
    """The place among the nodes of the one that gets rank 0; the others follow in their order."""

    @property
    def goes_on(self) -> bool:
        """Whether there is a further attempt."""
        return self.action in ("first", "resume", "move")


def decide(attempts: Sequence[Attempt], facts: Facts, checkpoint: int, nodes: Sequence[str] = ()) -> Decision:
    """What comes next for a run with these attempts, all ended, and this last complete checkpoint (0: none).

    `nodes` are those that the next attempt would have, where it has any yet.
    """
    exclude = tuple(dict.fromkeys(node for attempt in attempts for node in attempt.suspects))
    last = attempts[-1] if attempts else None
    if facts.is_end(checkpoint) or (last and last.ending.kind == "ended" and facts.is_end(last.step)):
        return Decision("finished", f"training is finished, at step {max(checkpoint, last.step if last else 0):,}")
    if why := _reason_to_stop(attempts, facts, checkpoint):
        return Decision("stop", why, checkpoint, exclude)
    onward = f"goes on from step {checkpoint:,}" if checkpoint else "begins at the beginning"
    if last:
        onward = f"attempt {last.number} ended at step {last.step:,}: {last.ending.sentence}; {onward}"
    if here := [node for node in exclude if node in nodes]:
        if facts.requeue or _is_refused(last):
            return Decision("move", f"{onward}, on other nodes than {', '.join(here)}", checkpoint, exclude)
        onward += f", on {', '.join(here)} again, which is under suspicion"
    elif exclude:
        onward += f", without {', '.join(exclude)}"
    return Decision("resume" if checkpoint else "first", onward, checkpoint, exclude)


def _is_refused(last: Attempt | None) -> bool:
    """Whether an attempt ended before it trained: its job goes back into the queue, whatever the recipe says."""
    return last is not None and last.ending.kind == "refused"


def first_node(attempts: Sequence[Attempt], nodes: Sequence[str]) -> int:
    """The place of the node that gets rank 0, so that ranks come upon nodes on which they met no doubtful result.

    A NaN that spread is met by ranks on all nodes, and no cluster has so many others: ranks change places instead.
    """
    met = {place for attempt in attempts for place in attempt.met}

    def again(first: int) -> int:
        return sum((place, node) in met for place, node in enumerate([*nodes[first:], *nodes[:first]]))

    return min(range(len(nodes)), key=again, default=0) if met else 0


def _reason_to_stop(attempts: Sequence[Attempt], facts: Facts, checkpoint: int) -> str:
    """Why nothing comes next, empty where something does; attempts that were forgiven are no reason."""
    pardon = max((attempt.number for attempt in attempts if attempt.forgiven), default=0)
    counted = [attempt for attempt in attempts if attempt.number > pardon]
    if not counted:
        return ""
    last = counted[-1]
    said = f"attempt {last.number} ended at step {last.step:,}: {last.ending.sentence}"
    if last.ending.kind in _FINAL:
        return f"{said}; {_FINAL[last.ending.kind]}"
    if last.ending.kind == "refused" and not last.suspects:
        return f"{said}; no node alone is to blame, so others would be refused as well"
    saved = max(max(attempt.checkpoint, attempt.began_at_step) for attempt in counted)
    if saved and not checkpoint:
        return f"the checkpoint of step {saved:,} is gone, and training would begin at random weights"
    if _row(counted, lambda one: one.ending.kind == "rerun") >= MOST_RERUNS:
        return f"{said}, for the {MOST_RERUNS}rd time in a row: three other GPUs gave the same, or the same one was met"
    if last.ending.kind in _OWN_FAILURES and _row(counted, lambda one: _same(one, last)) >= SAME_FAILURE:
        return f"{said}; {SAME_FAILURE} attempts in a row ended so, at the same step"
    if _row(counted, lambda one: one.began_at_step == last.began_at_step == one.checkpoint) >= NO_PROGRESS:
        return f"{said}; {NO_PROGRESS} attempts in a row began at step {last.began_at_step:,} and saved nothing newer"
    if len(counted) >= facts.max_attempts:
        return (
            f"{said}; that was attempt {len(counted)} of the {facts.max_attempts} that `resilience.max_attempts` allows"
        )
    return ""


def _row(attempts: Sequence[Attempt], matches: Any) -> int:
    """How many attempts match, from the last one backwards."""
    count = 0
    for attempt in reversed(attempts):
        if not matches(attempt):
            break
        count += 1
    return count


def _same(one: Attempt, other: Attempt) -> bool:
    """Whether two attempts failed alike: numbers in the text, such as addresses and ports, are of no account."""
    texts = [re.sub(r"\d+", "#", attempt.ending.sentence) for attempt in (one, other)]
    return one.ending.kind == other.ending.kind and one.step == other.step and texts[0] == texts[1]


# What follows reads and writes.


def decide_here(
    run: Path, attempts: Sequence[Attempt], facts: Facts, found: checkpoints.Found, nodes: Sequence[str] = ()
) -> Decision:
    """`decide` for a run's directory: what it is to train is compared with the checkpoint too. Nothing is written."""
    decision = decide(attempts, facts, found.step, nodes)
    if decision.action == "resume" and (changed := _changed(run, found, attempts)):
        return replace(decision, action="stop", sentence=changed)
    return decision


def start(run: Path, nodes: Sequence[str]) -> list[str]:
    """Decide before an attempt, and make its folder; the words for `train.sh`."""
    facts = read_facts(run)
    _put_down_lost(run, facts)
    found = checkpoints.settle(run / "checkpoints")
    for sentence in found.said:
        _say(sentence)
    attempts = read_attempts(run, facts)
    decision = replace(decide_here(run, attempts, facts, found, nodes), first=first_node(attempts, nodes))
    nodes = [*nodes[decision.first :], *nodes[: decision.first]]
    _record(run, decision, nodes)
    if decision.action == "move":
        _say(decision.sentence)
        return ["requeue", ",".join(decision.exclude)]
    if not decision.goes_on:
        _say(decision.sentence)
        return ["exit", "0" if decision.action == "finished" else "1"]
    number = new_attempt(run)
    _write(run / "attempts" / str(number) / "decision.json", _as_json(decision, nodes))
    argv = "argv.resume" if found.folder else "argv.first"
    _say(f"attempt {number} with {argv}: {decision.sentence}")
    return ["go", str(number), argv, str(decision.first)]


def end(run: Path, code: int, nodes: Sequence[str]) -> list[str]:
    """Put down how the last attempt ended, and decide what comes next; the words for `train.sh`."""
    facts = read_facts(run)
    folder = run / "attempts" / str(numbers(run)[-1])
    how = ending(folder, facts.world, srun_code=code)
    found = checkpoints.latest(run / "checkpoints")
    _put_down(folder, how, found.step, time.time(), code)
    attempts = read_attempts(run, facts)
    decision = decide(attempts, facts, found.step)
    _record(run, decision, nodes)
    _say(decision.sentence)
    if not (decision.goes_on and (facts.requeue or how.kind == "refused")) or (folder / "cancelled").exists():
        stopped = decision.action == "stop"
        return ["exit", "0" if how.kind == "ended" and not stopped else str(code or int(stopped))]
    return ["requeue", ",".join(decision.exclude)]


def _put_down_lost(run: Path, facts: Facts) -> None:
    """Put down how attempts ended whose batch shell did not live to see it."""
    for attempt in read_attempts(run, facts):
        folder = run / "attempts" / str(attempt.number)
        if "kind" in read_json(folder / "end.json"):
            continue
        how = attempt.ending
        if how.kind == "lost" and (down := _down(attempt.nodes)):
            how = replace(how, sentence=f"{how.sentence}; now {down}")
        saved = max(attempt.checkpoint, checkpoints.latest(run / "checkpoints").step)
        _put_down(folder, how, saved, _last_sign(folder), None)


def _put_down(folder: Path, how: Ending, checkpoint: int, at: float, code: int | None) -> None:
    said = {"time": at, "code": code, "checkpoint": checkpoint, **asdict(how)}
    _write(folder / "end.json", said)


def _last_sign(folder: Path) -> float:
    """When an attempt was last heard of: its log was written."""
    with suppress(OSError):
        return (folder / "train.log").stat().st_mtime
    return folder.stat().st_mtime


def _down(nodes: Sequence[str]) -> str:
    """Which of the nodes Slurm says are down, and why; empty where it says nothing."""
    if not nodes:
        return ""
    command = [
        "sinfo",
        "--noheader",
        "--Node",
        f"--nodes={','.join(nodes)}",
        "--states=down,fail,drain",
        "-o",
        "%N|%T|%E",
    ]
    with suppress(OSError, subprocess.SubprocessError):
        said = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_SLURM_S, check=True).stdout
        rows = [line.split("|") for line in dict.fromkeys(said.splitlines()) if line.count("|") == 2]
        return ", ".join(f"{node} is {state}" + (f" ({why})" if why != "none" else "") for node, state, why in rows)
    return ""


def _changed(run: Path, found: checkpoints.Found, attempts: Sequence[Attempt]) -> str:
    """What of schedule, batch and layout is not the checkpoint's, unless a person accepted it."""
    if not found.folder or (attempts and attempts[-1].forgiven):
        return ""
    try:
        saved = checkpoints.saved_arguments(found.folder)
    except checkpoints.UnreadableError as unreadable:
        _say(f"the arguments in {found.folder} are not compared: {unreadable}")
        return ""
    return "; ".join(checkpoints.differences(saved, (run / "argv.resume").read_text().splitlines()))


def _record(run: Path, decision: Decision, nodes: Sequence[str]) -> None:
    _write(run / "decision.json", _as_json(decision, nodes))


def _as_json(decision: Decision, nodes: Sequence[str]) -> dict[str, Any]:
    job = os.environ.get("SLURM_JOB_ID", "")
    restart = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
    return {"time": time.time(), "job": job, "restart": restart, "nodes": list(nodes), **asdict(decision)}


def _write(path: Path, value: Any) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(value, indent=1) + "\n")
    temporary.replace(path)


def _say(sentence: str) -> None:
    print(f"moekit: {sentence}", file=sys.stderr, flush=True)


def main(words: Sequence[str]) -> None:
    """Run one of the two commands in the working directory."""
    try:
        if words[:1] == ["start"]:
            said = start(Path(), words[1:])
        elif words[:1] == ["end"] and words[1:2]:
            said = end(Path(), int(words[1]), words[2:])
        else:
            sys.exit(str(__doc__))
    except OSError as failure:
        sys.exit(f"moekit: the run directory {Path.cwd()} cannot be read or written: {failure}")
    print("\n".join(said))


if __name__ == "__main__":
    main(sys.argv[1:])
