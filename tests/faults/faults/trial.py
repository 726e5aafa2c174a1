"""One case: a run is brought to the injection point, the fault is put in, and what the run does next is seen."""

from __future__ import annotations

import filecmp
import json
import os
import re
import shutil
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cluster import ENDED

from faults import harm as harms
from faults import inside, losses
from faults.bench import ITERS, PATIENCE_S, SAVE_INTERVAL, Bench, Plan, Ride
from faults.harm import Harm

NEXT = {
    "goes on": "the attempt trains on",
    "resumes": "the job goes back into the queue, and its next attempt starts from the checkpoint",
    "begins": "the job goes back into the queue, and its next attempt starts at the beginning: nothing was saved yet",
    "by hand": "the job ends; `moekit resume` starts an attempt from the checkpoint",
    "stops": "no further attempt is made, and the reason is told",
    "finished": "training is finished",
    "ends": "the job ends, and the run is no more",
}
"""What a run can do next."""


@dataclass(frozen=True)
class Case:
    """A fault at an injection point, and what is to follow."""

    name: str
    fault: str
    point: str
    then: str
    """One of NEXT."""
    harm: Harm = harms.nothing
    """Done when the point is reached."""
    plans: tuple[Plan, ...] = ()
    """What happens inside the training processes (`inside.py`)."""
    start: str = "going"
    """`going` (a run that trains), or before a job is submitted: `early`, `late` (copies), `first` (no attempt yet),
    or `disk` (a copy of `early` on a disk of its own)."""
    before: Harm = harms.nothing
    """Done before the job is submitted, where it starts with this case."""
    repair: Harm = harms.nothing
    """Done before a person says `moekit resume`."""
    says: str = ""
    """A pattern that the next decision's sentence has."""
    step: int | None = None
    """The checkpoint's step from which the next attempt starts."""
    leaves: tuple[int, ...] = ()
    """The next attempt is on none of the nodes that had these places in this one."""
    attempts: int = 1
    """How many attempts the fault takes, one after the other."""
    saved: bool = False
    """Whether the attempt must have saved before (its writer then has processes of its own)."""
    trains: bool = True
    """Whether it is waited for the next attempt's training; else it is enough that it starts from a checkpoint that is
    byte for byte one that others of the cases are trained from."""


@dataclass
class Result:
    """What was seen."""

    case: str
    ok: bool
    observed: str
    detail: str
    numbers: int
    """How many logged numbers were those of the undisturbed run."""
    seconds: float


def run_case(case: Case, bench: Bench) -> Result:
    """Try one case; a run that has survived it goes on to the next."""
    began = time.monotonic()
    ride, observed, same = None, "nothing", 0
    bench.heal()
    try:
        ride, hit = start(case, bench)
        observed, sentence = disturb(case, ride, hit)
        nodes = [str(node) for node in ride.said(hit).get("nodes", [])]
        same, complaints = judge(case, ride, (observed, sentence), nodes)
    except (AssertionError, OSError, subprocess.SubprocessError, TimeoutError) as failure:
        sentence, complaints = "", [f"{type(failure).__name__}: {failure}"]
    if ride and not complaints and case.trains and ride.state() == "RUNNING" and case.start != "disk":
        bench.going = ride
    elif ride:
        _have_done(case, ride, bool(complaints))
    detail = "; ".join(complaints) or " ".join(sentence.split())
    return Result(case.name, not complaints, observed, detail, same, round(time.monotonic() - began, 1))


def _have_done(case: Case, ride: Ride, failed: bool) -> None:
    ride.release()
    ride.bench.heal()
    with suppress(OSError, subprocess.SubprocessError):
        case.repair(ride)
    ride.cancel()
    if failed and case.start != "disk":
        print(f"    what it left: {ride.path}")
    else:
        ride.bench.leave(ride)


def start(case: Case, bench: Bench) -> tuple[Ride, int]:
    """The run that the case is about, its job submitted, and the number of the attempt that the fault hits."""
    if case.start == "going":
        ride = bench.take()
        ride.wait_for(lambda: losses.last_step(ride.path, ride.attempt), "the first step")
        began = [ride.said(number).get("step") for number in ride.run.numbers()[-3:]]
        if case.saved or len(set(began)) == 1:  # five attempts in a row that save nothing end a run
            ride.wait_for_progress(ride.attempt)
        if case.plans:
            ride.arm(*case.plans, attempt=ride.attempt)
        return ride, ride.attempt
    if bench.going:
        bench.leave(bench.going)
        bench.going = None
    ride = bench.copy(
        "reference" if case.start == "first" else "early" if case.start == "disk" else case.start,
        "disk" if case.start == "disk" else "",
    )
    if case.start == "first":
        for left in ("attempts", "checkpoints"):
            shutil.rmtree(ride.path / left)
        (ride.path / "decision.json").unlink(missing_ok=True)
    hit = ride.attempt + bool(case.plans)
    if case.plans:
        ride.arm(*case.plans, attempt=hit)
    case.before(ride)
    ride.submit()
    return ride, hit


def disturb(case: Case, ride: Ride, hit: int) -> tuple[str, str]:
    """Put the fault in; what the run did next, and the sentence of that decision."""
    if case.plans:
        ride.wait_for((ride.path / inside.REACHED).exists, "the injection point")
    began = time.time() if case.start == "going" else 0.0
    case.harm(ride)
    ride.release()
    observed, sentence = watch(case, ride, hit + case.attempts - 1, began)
    if observed == "ended" and case.then == "ends":
        return "ends", sentence
    if observed == "ended" and case.then in ("by hand", "stops", "finished"):
        return by_hand(case, ride, hit + case.attempts - 1)
    return observed, sentence


def watch(case: Case, ride: Ride, last: int, began: float) -> tuple[str, str]:
    """What a run does after its attempt `last`: one of NEXT, or `ended`; and the sentence that goes with it."""
    deadline, before = time.monotonic() + PATIENCE_S, losses.last_step(ride.path, last)
    while time.monotonic() < deadline:
        attempt, state, said = ride.attempt, ride.state(), ride.said()
        if attempt > last and (own := ride.said(attempt)):
            return {"resume": "resumes", "first": "begins"}.get(own["action"], own["action"]), own["sentence"]
        if said.get("time", 0) > began and said.get("action") in ("stop", "finished") and state in ENDED:
            return {"stop": "stops"}.get(said["action"], said["action"]), said["sentence"]
        if state in ENDED and ride.state() in ENDED and ride.attempt == attempt and ride.said() == said:
            return "ended", f"{state}: {said.get('sentence', '')}"
        if case.then == "goes on" and losses.last_step(ride.path, last) >= before + SAVE_INTERVAL + 2:
            return "goes on", ""
        time.sleep(0.3)
    return "nothing", f"{PATIENCE_S:.0f} s have passed; job {ride.job} is {ride.state()}"


def by_hand(case: Case, ride: Ride, last: int) -> tuple[str, str]:
    """A person says `moekit resume`."""
    case.repair(ride)
    done = ride.bench.moekit("resume", ride.path.name, "--json")
    if done.returncode:
        return "finished" if "is finished" in done.stderr else "stops", done.stderr
    ride.job = int(json.loads(done.stdout)["jobs"][0])
    observed, sentence = watch(case, ride, last, time.time())
    return {"resumes": "by hand"}.get(observed, observed), sentence


def judge(case: Case, ride: Ride, seen: tuple[str, str], nodes: list[str]) -> tuple[int, list[str]]:
    """How many numbers are those of an undisturbed run, and what is not as it should be; `nodes` were those it hit."""
    observed, sentence = seen
    complaints = []
    if observed != case.then:
        complaints.append(f"expected: {case.then}, observed: {observed} ({sentence})")
    if not re.search(case.says, sentence):
        complaints.append(f"expected `{case.says}` in: {sentence}")
    if case.then == "ends":
        return 0, complaints
    attempt = ride.attempt
    if not complaints and observed in ("resumes", "by hand", "begins"):
        said = ride.said(attempt)
        if case.step is not None and said["step"] != case.step:
            complaints.append(f"expected a start from step {case.step}, observed {said['step']}: {sentence}")
        if met := {nodes[place] for place in case.leaves} & set(said["nodes"]):
            complaints.append(f"expected other nodes than {', '.join(met)}")
        if case.trains:
            ride.wait_for(lambda: losses.last_step(ride.path, attempt) > said["step"], "the first step afterwards")
        elif differs := _differing(ride, case.start, said["step"]):
            complaints.append(f"the checkpoint of step {said['step']} is not what it was: {differs}")
    if observed == "finished" and (lost := losses.missing(ride.path, ITERS)):
        complaints.append(f"no attempt logged the steps {lost}")
    same, other = losses.compare(ride.path, ride.bench.reference)
    return same, complaints + other[:3]


def _differing(ride: Ride, of: str, step: int) -> str:
    """Which file of a checkpoint is not that of the kept run, or that the tracker names another; empty for none."""
    if ride.run.latest_checkpoint.read_text().strip() != str(step):
        return ride.run.latest_checkpoint.name
    folder = Path(f"checkpoints/iter_{step:07}")
    kept = ride.bench.runs / of / folder
    _, differing, absent = filecmp.cmpfiles(kept, ride.path / folder, os.listdir(kept), shallow=False)  # noqa: PTH208
    return ", ".join([*differing, *absent])
