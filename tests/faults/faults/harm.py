"""What is done to a run from outside: to its processes, its nodes, its job, Slurm itself, and its files."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from cluster import Cluster
from cluster.machine import processes

from faults.bench import DISK_MIB, Ride

Harm = Callable[[Ride], None]


def nothing(ride: Ride) -> None:
    """What is done inside the training processes is enough."""


# Processes


def kill(pids: list[int]) -> None:
    assert pids, "there is nothing to kill"
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def rank_of(ride: Ride, rank: int) -> list[int]:
    here = {"RANK": str(rank), "SLURM_JOB_ID": ride.job_word, "MOEKIT_ATTEMPT": str(ride.attempt)}
    return processes(("job/entry.py",), **here)[:1]  # the oldest: it forks to write its checkpoints


def torchrun_of(ride: Ride, node: int) -> list[int]:
    here = {"SLURM_NODEID": str(node), "SLURM_JOB_ID": ride.job_word, "MOEKIT_ATTEMPT": str(ride.attempt)}
    found = processes(("torch.distributed.run",), **here)
    return [pid for pid in found if b"\0RANK=" not in b"\0" + Path(f"/proc/{pid}/environ").read_bytes()]


def kill_rank(rank: int) -> Harm:
    return lambda ride: kill(rank_of(ride, rank))


def kill_torchrun(node: int) -> Harm:
    """And then the ranks it leaves: a cluster's Slurm finds them by their cgroup, which this one has not."""

    def harm(ride: Ride) -> None:
        kill(torchrun_of(ride, node))
        kill(rank_of(ride, node))

    return harm


def kill_batch_shell(ride: Ride) -> None:
    here = {"SLURM_JOB_ID": ride.job_word, "SLURM_CONF": str(ride.slurm.conf)}
    kill(processes(("bash", "train.sh"), **here)[:1])


def kill_srun(ride: Ride) -> None:
    kill(processes(("srun", "--nodes=2"), SLURM_JOB_ID=ride.job_word, SLURM_CONF=str(ride.slurm.conf)))


# Nodes, by their place in the attempt


def kill_slurmd(node: int, again_after_s: float | None = None) -> Harm:
    return _for_a_while(node, Cluster.kill_slurmd, Cluster.start_slurmd, again_after_s)


def cut(node: int, for_s: float | None = None) -> Harm:
    return _for_a_while(node, Cluster.cut, Cluster.join, for_s)


def _for_a_while(
    node: int, lose: Callable[[Cluster, str], object], regain: Callable[[Cluster, str], object], for_s: float | None
) -> Harm:
    """Something of a node is lost, and there again after a time; for good with None."""

    def harm(ride: Ride) -> None:
        name = ride.nodes()[node]
        lose(ride.slurm, name)
        if for_s is not None:
            time.sleep(for_s)
            regain(ride.slurm, name)

    return harm


def power_cut(node: int) -> Harm:
    return lambda ride: ride.slurm.kill(ride.nodes()[node])


def set_state(node: int, state: str) -> Harm:
    def harm(ride: Ride) -> None:
        call(ride, "scontrol", "update", f"NodeName={ride.nodes()[node]}", f"State={state}", "Reason=a test")

    return harm


# The job


def call(ride: Ride, *words: str) -> None:
    done = ride.slurm.call(*words)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"


def scancel(*options: str, settle_s: float = 0) -> Harm:
    """`settle_s`: how long to wait for the signal to be everywhere."""

    def harm(ride: Ride) -> None:
        call(ride, "scancel", *options, ride.job_word)
        time.sleep(settle_s)

    return harm


def scontrol(*words: str, settle_s: float = 0) -> Harm:
    """`{job}` in a word is the job's id."""

    def harm(ride: Ride) -> None:
        call(ride, "scontrol", *(word.format(job=ride.job) for word in words))
        time.sleep(settle_s)

    return harm


def time_limit(ride: Ride) -> None:
    """Its signal comes 5 minutes ahead: soon, where no more are left. Then the job gets its time back."""
    log = ride.run.attempt(ride.attempt).train_log
    call(ride, "scontrol", "update", f"JobId={ride.job}", "TimeLimit=6")
    deadline = time.monotonic() + 120
    while "death signal" not in log.read_text() and time.monotonic() < deadline:
        time.sleep(0.5)
    call(ride, "scontrol", "update", f"JobId={ride.job}", "TimeLimit=1000")


def preempt(grace_s: int = 0) -> Harm:
    """A job of a higher partition wants the first node."""

    def harm(ride: Ride) -> None:
        call(ride, "scontrol", "update", "PartitionName=gpu", f"GraceTime={grace_s}")
        words = ["sbatch", "--parsable", "--partition=urgent", f"--nodelist={ride.nodes()[0]}", "--exclusive"]
        call(ride, *words, "--mem=0", "--output=/dev/null", "--time=2", "--wrap=sleep 5")
        time.sleep(3 if grace_s else 0)
        call(ride, "scontrol", "update", "PartitionName=gpu", "GraceTime=0")

    return harm


# Slurm


def without_controller(for_s: float) -> Harm:
    """The controller is away for some time."""

    def harm(ride: Ride) -> None:
        ride.slurm.stop_controller()
        time.sleep(for_s)
        ride.slurm.start_controller()

    return harm


# Files


def fill_disk(ride: Ride) -> None:
    with contextlib.suppress(OSError), (ride.path / "filler").open("wb") as filler:
        while True:
            filler.write(bytes(1 << 16))
            filler.flush()


def empty_disk(ride: Ride) -> None:
    (ride.path / "filler").unlink()
    subprocess.run(["mount", "-o", f"remount,size={DISK_MIB}M", str(ride.path)], check=True)


def chattr(how: str) -> Harm:
    """`+i` takes away the right to write, from root too; what is held is still told to go on."""

    def change(ride: Ride) -> None:
        subprocess.run(["chattr", "-R", how, str(ride.path)], check=True)
        subprocess.run(["chattr", "-R", "-i", str(ride.path / "fault")], check=False)

    return change


def remount(how: str) -> Harm:
    return lambda ride: subprocess.run(["mount", "-o", f"remount,{how}", str(ride.path)], check=True) and None


def remove(ride: Ride) -> None:
    shutil.rmtree(ride.path, ignore_errors=True)
    shutil.rmtree(ride.path, ignore_errors=True)  # what the processes wrote meanwhile


def newest(ride: Ride) -> Path:
    """The folder of the newest checkpoint."""
    return max((ride.path / "checkpoints").glob("iter_*"))


def damage(pattern: str, how: str, which: int = -1) -> Harm:
    """Do something to the files of a checkpoint, by default the newest one's: `cut`, `empty`, `garbage`, `remove`."""

    def harm(ride: Ride) -> None:
        folder = sorted((ride.path / "checkpoints").glob("iter_*"))[which]
        found = sorted(folder.glob(pattern)) if pattern else [folder]
        assert found, f"no {pattern} in {folder}"
        for path in found:
            spoil(path, how)

    return harm


def spoil(path: Path, how: str) -> None:
    """`cut` the last tenth of a file (its last byte: `byte`), `empty` it, fill it with `garbage`, or `remove` it."""
    if how == "remove":
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    elif how == "cut":
        os.truncate(path, path.stat().st_size * 9 // 10)
    elif how == "half":
        os.truncate(path, path.stat().st_size // 2)
    elif how == "byte":
        os.truncate(path, path.stat().st_size - 1)
    elif how == "empty":
        os.truncate(path, 0)
    elif how == "garbage":
        path.write_bytes(bytes(range(256)) * max(1, path.stat().st_size // 256))
    else:
        raise ValueError(how)


def file(name: str, how: str) -> Harm:
    """The same to a file of the run."""
    return lambda ride: spoil(ride.path / name, how)


def write(name: str, text: str | bytes) -> Harm:
    def harm(ride: Ride) -> None:
        path = ride.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode() if isinstance(text, str) else text)

    return harm


def option(name: str, value: str) -> Harm:
    """Change an option of argv.resume."""

    def harm(ride: Ride) -> None:
        path = ride.path / "argv.resume"
        words = path.read_text().splitlines()
        if name in words:
            words[words.index(name) + 1] = value
        else:
            words += [name, value]
        path.write_text("".join(f"{word}\n" for word in words))

    return harm


def until_taken(first: Harm) -> Harm:
    """And wait, before what is held goes on, until Slurm has noticed and takes the job away."""

    def harm(ride: Ride) -> None:
        first(ride)
        deadline = time.monotonic() + 120
        while ride.state() == "RUNNING" and time.monotonic() < deadline:
            time.sleep(0.5)

    return harm


def both(*harms: Harm) -> Harm:
    def harm(ride: Ride) -> None:
        for one in harms:
            one(ride)

    return harm
