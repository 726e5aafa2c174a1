"""Faults of processes, nodes, jobs, Slurm and disks."""

from __future__ import annotations

from faults import harm as h
from faults.harm import Harm
from faults.points import at_points, at_rest, between, one
from faults.trial import Case


def processes() -> list[Case]:
    killed = "rank 1 was killed"
    return [
        *at_points(
            "kill-rank", "SIGKILL of a rank", "begin load first step shards validation", h.kill_rank(1), says=killed
        ),
        *at_points("kill-rank", "SIGKILL of a rank", "metadata tracker", h.kill_rank(0), says="rank 0 was killed"),
        one("kill-rank-end", "SIGKILL of a rank", "end", h.kill_rank(1), "finished"),
        *at_points("kill-torchrun", "SIGKILL of torchrun", "begin first step shards validation", h.kill_torchrun(1)),
        *at_points("kill-torchrun0", "SIGKILL of torchrun", "metadata tracker", h.kill_torchrun(0)),
        *at_points(
            "kill-shell",
            "SIGKILL of the batch shell",
            "begin step shards tracker validation",
            h.kill_batch_shell,
            "by hand",
        ),
        one("kill-shell-end", "SIGKILL of the batch shell", "end", h.kill_batch_shell, "finished"),
        *at_points("kill-srun", "SIGKILL of srun", "begin step metadata validation", h.kill_srun),
    ]


def nodes() -> list[Case]:
    down, lost = "a node is set down (`scontrol`)", "a node's power is cut"
    return [
        *at_points(
            "kill-slurmd-back", "SIGKILL of slurmd, started again", "step shards", h.kill_slurmd(1, 3), "goes on"
        ),
        *at_points("kill-slurmd0-back", "SIGKILL of slurmd, started again", "step", h.kill_slurmd(0, 3), "goes on"),
        *at_points("kill-slurmd", "SIGKILL of slurmd", "step", h.until_taken(h.kill_slurmd(1)), leaves=(1,)),
        *at_points("kill-slurmd0", "SIGKILL of slurmd", "shards", h.until_taken(h.kill_slurmd(0)), leaves=(0,)),
        *at_points("cut", "a node's network is cut", "step shards", h.until_taken(h.cut(1)), leaves=(1,)),
        *at_points("cut0", "a node's network is cut", "validation", h.until_taken(h.cut(0)), leaves=(0,)),
        *at_points("cut-back", "a node's network is cut for 4 s", "step validation", h.cut(1, 4), "goes on"),
        *at_points("down", down, "begin step shards validation", h.set_state(1, "DOWN")),
        *at_points("down0", down, "step tracker", h.set_state(0, "DOWN")),
        *at_points("drain", "a node is drained", "step", h.set_state(1, "DRAIN"), "goes on"),
        *at_points("power", lost, "step shards", h.until_taken(h.power_cut(1)), leaves=(1,)),
        *at_points("power0", lost, "metadata", h.until_taken(h.power_cut(0)), leaves=(0,)),
        one("power0-end", lost, "end", h.until_taken(h.power_cut(0)), "finished"),
    ]


def the_job() -> list[Case]:
    def told(*options: str) -> Harm:
        return h.scancel(*options, settle_s=2)

    save = "scancel --batch --signal=TERM"
    return [
        *at_points("scancel", "scancel", "begin", h.scancel(), "by hand"),
        *at_points("scancel", "scancel", "step shards validation", told(), "by hand"),
        between("scancel-between", "scancel", h.scancel(), "by hand"),
        *at_points("told", save, "step shards tracker validation", told("--batch", "--signal=TERM"), saved=True),
        *at_points("told", save, "first", told("--batch", "--signal=TERM"), saved=True),
        one("told-end", save, "end", told("--batch", "--signal=TERM"), "finished"),
        *at_points("told-steps", "scancel --signal=TERM", "step shards", told("--signal=TERM"), saved=True),
        *at_points("told-kill", "scancel --signal=KILL", "step", h.scancel("--signal=KILL"), "by hand"),
        *at_points("limit", "the time limit, told in time", "first step metadata validation", h.time_limit, saved=True),
        *at_points(
            "requeue",
            "scontrol requeue",
            "begin load step shards metadata tracker validation",
            h.scontrol("requeue", "{job}"),
        ),
        one("requeue-end", "scontrol requeue", "end", h.scontrol("requeue", "{job}"), "finished"),
        *at_points(
            "hold",
            "scontrol requeuehold and release",
            "step",
            h.both(h.scontrol("requeuehold", "{job}", settle_s=5), h.scontrol("release", "{job}")),
        ),
        *at_points(
            "suspend",
            "scontrol suspend and resume",
            "step shards",
            h.both(h.scontrol("suspend", "{job}", settle_s=3), h.scontrol("resume", "{job}")),
            "goes on",
        ),
        *at_points("preempt", "preemption", "begin step shards validation", h.preempt()),
        *at_points("preempt-grace", "preemption with a grace time", "step", h.preempt(60), saved=True),
    ]


def slurm() -> list[Case]:
    away = "the controller is away"
    return [
        *at_points("controller", f"{away} for 5 s", "step tracker validation", h.without_controller(5), "goes on"),
        *at_points(
            "controller-kill", f"{away} as an attempt ends", "step", h.both(h.kill_rank(1), h.without_controller(12))
        ),
        between("controller-between", f"{away} for 5 s", h.without_controller(5)),
    ]


def disk() -> list[Case]:
    full, locked = h.fill_disk, h.chattr("+i")
    unlock = h.chattr("-i")
    return [
        *at_points(
            "full", "the disk is full", "first step shards metadata", full, "by hand", start="disk", repair=h.empty_disk
        ),
        at_rest("full-rest", "the disk is full", full, "by hand", "disk", repair=h.empty_disk),
        *at_points(
            "locked",
            "the run directory takes no writing",
            "first step shards tracker",
            locked,
            "by hand",
            start="early",
            repair=unlock,
        ),
        at_rest(
            "read-only-rest",
            "the run directory is mounted read-only",
            h.remount("ro"),
            "by hand",
            "disk",
            repair=h.remount("rw"),
        ),
        *at_points("removed", "the run directory is removed", "first step shards", h.remove, "ends", start="early"),
        between("removed-between", "the run directory is removed", h.remove, "ends"),
    ]
