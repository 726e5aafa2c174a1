"""Where faults are tried: a Slurm of four nodes, and runs of a tiny model to disturb.

In the work folder are kept, each made once by real training: `reference`, a run that nothing disturbs; `early` and
`late`, runs whose job was cancelled near the beginning and near the end. Faults are tried on copies of those.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster import Cluster, running
from tiny import tiny

from faults import inside, losses
from moekit import share
from moekit.data.quickstart import prepare_python_docs, prepare_tokenizer
from moekit.launch.run_files import job_files
from moekit.launch.rundir import RunDir

ITERS, SAVE_INTERVAL, EVAL_INTERVAL = 60, 4, 10
EARLY, LATE = 13, 57
"""The steps in which two of the runs were ended; the last checkpoint is of the step before."""
PATIENCE_S = 600.0
"""A shared machine may take ten times as long as an idle one."""
DISK_MIB = 160
Plan = dict[str, Any]
"""What is to happen inside a training process (`inside.py`)."""
KEPT = ("reference", "early", "late")
MORE_CONF = """
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=urgent Nodes=ALL MaxTime=1:00:00 State=UP PriorityTier=10
"""


def recipe(iters: int, more: str = "") -> str:
    """The tiny model, saving and validating often, that comes back by itself."""
    return (
        tiny(iters, more)
        .replace("eval_iters: 1", f"eval_iters: 1, eval_interval: {EVAL_INTERVAL}")
        .replace("save_interval: 100000", f"save_interval: {SAVE_INTERVAL}")
        + "monitor: {tokens_per_expert_interval: null, routing_trace: null,\n"
        + "          routing_trace_max_training_iters: null, routing_trace_last_iters: null}\n"
        + "resilience: {requeue: true, exit_signal_handler: true}\n"
    )


@dataclass
class Ride:
    """A run on its way."""

    bench: Bench
    run: RunDir
    job: int = 0

    @property
    def slurm(self) -> Cluster:
        return self.bench.slurm

    @property
    def path(self) -> Path:
        return self.run.path

    @property
    def attempt(self) -> int:
        """The newest attempt's number."""
        return max(self.run.numbers(), default=0)

    def said(self, attempt: int | None = None) -> dict[str, Any]:
        """The decision that an attempt began with, or the last one of the run."""
        folder = self.path if attempt is None else self.run.attempt(attempt).path
        with suppress(OSError, ValueError):
            found = json.loads((folder / "decision.json").read_text())
            return found if isinstance(found, dict) else {}
        return {}

    def nodes(self) -> list[str]:
        """The newest attempt's, in the order of ranks."""
        return [str(node) for node in self.said(self.attempt).get("nodes", [])]

    def submit(self) -> None:
        self.job = self.slurm.submit(self.path)

    def state(self) -> str:
        """Slurm's word for its job; empty where Slurm does not answer."""
        with suppress(subprocess.TimeoutExpired):
            done = self.slurm.call("squeue", "-h", "-t", "all", "-j", self.job_word, "-o", "%T", timeout_s=5)
            return done.stdout.strip()
        return ""

    @property
    def job_word(self) -> str:
        return str(self.job)

    def arm(self, *plans: Plan, attempt: int) -> None:
        """Say what is to happen inside the training processes of an attempt; a plan may say another, or `None`: all."""
        folder = self.path / "fault"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        said = [{"attempt": attempt, **plan} for plan in plans]
        said = [{name: value for name, value in plan.items() if value is not None} for plan in said]
        (folder / "new").write_text(json.dumps(said))
        (folder / "new").rename(self.path / inside.PLAN)

    def release(self) -> None:
        """Let go on what is held."""
        with suppress(OSError):
            (self.path / inside.GO).touch()

    def wait_for(self, there: Callable[[], object], what: str, timeout_s: float = PATIENCE_S) -> None:
        """Wait, as long as the job lives."""
        deadline = time.monotonic() + timeout_s
        while not there():
            state = self.state()
            if state not in ("", "PENDING", "RUNNING", "COMPLETING") and not there():
                raise AssertionError(f"job {self.job} is {state}, and {what} did not come: {self.said()}")
            if time.monotonic() > deadline:
                raise AssertionError(f"{what} did not come in {timeout_s:.0f} s; job {self.job} is {state}")
            time.sleep(0.2)

    def wait_for_progress(self, attempt: int) -> None:
        """Until an attempt has trained and saved."""

        def saved() -> bool:
            with suppress(OSError, ValueError):
                return int(self.run.latest_checkpoint.read_text()) > int(self.said(attempt).get("step") or 0)
            return False

        self.wait_for(saved, f"a checkpoint of attempt {attempt}")

    def cancel(self) -> None:
        """End its job, whatever becomes of it."""
        with suppress(subprocess.TimeoutExpired):
            self.slurm.call("scontrol", "update", f"JobId={self.job}", "Requeue=0", timeout_s=5)
            self.slurm.call("scancel", "--signal=KILL", "--full", self.job_word, timeout_s=5)
            self.slurm.call("scancel", self.job_word, timeout_s=5)
            self.slurm.wait(self.job, timeout_s=60)


@dataclass
class Bench:
    """The cluster and the runs; `work` is kept from one time to the next."""

    work: Path
    slurm: Cluster
    profile: Path
    going: Ride | None = None
    """A run that trains now, has survived what was done to it, and may be disturbed again."""
    copies: int = 0
    reference: losses.Numbers = field(default_factory=dict)

    @property
    def runs(self) -> Path:
        return self.slurm.shared_root / "runs"

    def moekit(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        return self.slurm.moekit(*words, "--profile", self.profile)

    def new(self, name: str, iters: int = ITERS, more: str = "") -> Ride:
        """A run of its own, not yet submitted, whose training processes ask for a plan."""
        shutil.rmtree(self.runs / name, ignore_errors=True)
        text = self.work / f"{name}.yaml"
        text.write_text(recipe(iters, more))
        done = self.moekit("launch", text, "--on", "slurm", "--name", name, "--no-submit", "--json")
        assert done.returncode == 0, done.stderr
        ride = Ride(self, RunDir(self.runs / name))
        shutil.copy(inside.__file__, ride.run.job / "sitecustomize.py")
        return ride

    def copy(self, of: str, name: str = "") -> Ride:
        """A copy of one of the kept runs, not yet submitted, with the code of now."""
        self.copies += 1
        to = self.runs / (name or f"copy{os.getpid()}_{self.copies}")
        shutil.copytree(self.runs / of, to, dirs_exist_ok=True)
        for left in ("submissions", "jobs", "fault"):
            shutil.rmtree(to / left, ignore_errors=True)
        for path, text in job_files().items():
            (to / path).write_text(text)
        (to / "train.sh").write_text((share.folder("slurm") / "train.sh").read_text())
        shutil.copy(inside.__file__, to / "job/sitecustomize.py")
        return Ride(self, RunDir(to))

    def take(self) -> Ride:
        """A run that trains now and has steps left: the one that is going, or a copy of `early`."""
        ride, self.going = self.going, None
        if ride and losses.last_step(ride.path, ride.attempt) < ITERS - 3 * SAVE_INTERVAL and ride.state() == "RUNNING":
            return ride
        if ride:
            self.leave(ride)
        ride = self.copy("early")
        last = ride.attempt
        ride.submit()
        ride.wait_for(lambda: ride.attempt > last, "an attempt")
        return ride

    def leave(self, ride: Ride) -> None:
        """Have done with a run."""
        ride.cancel()
        shutil.rmtree(ride.path, ignore_errors=True)

    def heal(self) -> None:
        """Give the cluster back what it lost."""
        slurm = self.slurm
        if "slurmctld" not in slurm.daemons:
            slurm.start_controller()
        for node in slurm.nodes:
            if node in slurm.daemons:
                slurm.join(node)
                slurm.start_slurmd(node)
            else:
                slurm.start(node)
        down = slurm.call("sinfo", "-h", "-N", "-p", "gpu", "-t", "down,drain,fail", "-o", "%N").stdout.split()
        for node in dict.fromkeys(down):
            slurm.call("scontrol", "update", f"NodeName={node}", "State=RESUME")

    def prepare(self, say: Callable[[str], None], names: tuple[str, ...]) -> None:
        """Make the kept runs that are not there yet."""
        kept = self.work / "kept.json"
        done = json.loads(kept.read_text()) if kept.exists() else []
        for name, make in (("reference", self._reference), ("early", self._early), ("late", self._late)):
            if name in names and name not in done:
                say(f"training the run `{name}`")
                make(name)
                done.append(name)
                kept.write_text(json.dumps(done))
        self.reference = losses.numbers(self.runs / "reference/attempts/1")
        assert len(self.reference) == ITERS, "the undisturbed run has not logged all its steps"

    def _reference(self, name: str) -> None:
        ride = self.new(name)
        ride.submit()
        assert self.slurm.wait(ride.job, timeout_s=PATIENCE_S) == "COMPLETED", ride.said()

    def _early(self, name: str) -> None:
        ride = self.new(name)
        ride.arm({"point": "step", "rank": 1, "do": "hold", "iteration": EARLY}, attempt=1)
        ride.submit()
        self._end_held(ride)

    def _late(self, name: str) -> None:
        shutil.rmtree(self.runs / name, ignore_errors=True)
        ride = self.copy("early", name)
        ride.arm({"point": "step", "rank": 1, "do": "hold", "iteration": LATE}, attempt=2)
        ride.submit()
        self._end_held(ride)

    def _end_held(self, ride: Ride) -> None:
        """End a run at a point that it has reached."""
        ride.wait_for((ride.path / inside.REACHED).exists, "the injection point")
        ride.cancel()
        ride.release()


@contextmanager
def bench(work: Path, say: Callable[[str], None], names: tuple[str, ...] = KEPT) -> Iterator[Bench]:
    """Bring the cluster up, with a disk of its own at `runs/disk`, and make those of KEPT in `work`."""
    shared = work / "shared"
    disk = shared / "runs/disk"
    disk.mkdir(parents=True, exist_ok=True)
    for prepare in (prepare_python_docs, prepare_tokenizer):
        prepare(shared, say)
    while disk.is_mount():
        subprocess.run(["umount", "--lazy", str(disk)], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}M", "moekit-faults", str(disk)], check=True)
    try:
        with running(shared, more_conf=MORE_CONF) as slurm:
            environment = {"OMP_NUM_THREADS": "1"}
            profile = slurm.profile("faults", gpus_per_node=1, cpus_per_task=2, environment=environment)
            here = Bench(work, slurm, profile)
            here.prepare(say, names)
            yield here
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=False)
