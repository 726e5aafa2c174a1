"""The table of faults: each at its points, with what is to follow."""

from __future__ import annotations

from faults import harm as h
from faults.bench import Plan
from faults.harm import Harm
from faults.trial import Case

POINTS = {
    "begin": "before anything is imported",
    "load": "before the checkpoint is read",
    "first": "before the first step",
    "step": "in a step",
    "shards": "in a save, shards half written",
    "metadata": "in a save, `.metadata` missing",
    "tracker": "in a save, tracker not written",
    "validation": "in a validation",
    "end": "after the last step",
}
BETWEEN, REST = "between attempts", "at rest"
_RANK = {"metadata": 0, "tracker": 0}
"""The rank that comes by a point; where both do, the last one."""
_BEFORE_STEPS = ("begin", "load", "first")


def held(point: str, **more: object) -> Plan:
    return {"point": point, "rank": _RANK.get(point, 1), "do": "hold", **more}


def at_points(slug: str, fault: str, points: str, harm: Harm, then: str = "resumes", **more: object) -> list[Case]:
    """The same fault at several points, at each of which a rank is held while it is put in."""
    return [one(f"{slug}-{point}", fault, point, harm, then, **more) for point in points.split()]


def one(name: str, fault: str, point: str, harm: Harm, then: str = "resumes", **more: object) -> Case:
    start = "early" if point in _BEFORE_STEPS else "late" if point == "end" else "going"
    return Case(name, fault, POINTS[point], then, harm, (held(point),), **{"start": start, **more})  # type: ignore[arg-type]


def inside(slug: str, fault: str, points: str, do: str, then: str = "resumes", **more: object) -> list[Case]:
    """What a rank does to itself at several points."""
    cases = []
    for point in points.split():
        start = "early" if point in _BEFORE_STEPS else "late" if point == "end" else "going"
        plan = {**held(point), "do": do}
        cases.append(Case(f"{slug}-{point}", fault, POINTS[point], then, plans=(plan,), **{"start": start, **more}))  # type: ignore[arg-type]
    return cases


def at_rest(name: str, fault: str, harm: Harm, then: str = "resumes", start: str = "early", **more: object) -> Case:
    """Something is wrong in a run's files when its job starts."""
    return Case(name, fault, REST, then, start=start, before=harm, **more)  # type: ignore[arg-type]


def between(name: str, fault: str, harm: Harm, then: str = "resumes", **more: object) -> Case:
    """Something happens while the job waits for its next attempt."""
    back = h.both(h.scontrol("requeue", "{job}"), harm)
    return Case(name, fault, BETWEEN, then, back, (held("step"),), **more)  # type: ignore[arg-type]


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
    # the limit's signal comes 5 minutes ahead of it: at once, where no more than those are left
    limit = h.both(
        h.scontrol("update", "JobId={job}", "TimeLimit=6", settle_s=3),
        h.scontrol("update", "JobId={job}", "TimeLimit=1000"),
    )
    return [
        *at_points("scancel", "scancel", "begin", h.scancel(), "by hand"),
        *at_points("scancel", "scancel", "step shards validation", told(), "by hand"),
        between("scancel-between", "scancel", h.scancel(), "by hand"),
        *at_points("told", save, "step shards tracker validation", told("--batch", "--signal=TERM"), saved=True),
        *at_points("told", save, "first", told("--batch", "--signal=TERM"), saved=True),
        one("told-end", save, "end", told("--batch", "--signal=TERM"), "finished"),
        *at_points("told-steps", "scancel --signal=TERM", "step shards", told("--signal=TERM"), saved=True),
        *at_points("told-kill", "scancel --signal=KILL", "step", h.scancel("--signal=KILL"), "by hand"),
        *at_points("limit", "the time limit, told in time", "first step metadata validation", limit, saved=True),
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


def checkpoints() -> list[Case]:
    older, newest = 8, 12
    shard, gone = "a checkpoint's shard", "would begin at random weights"
    tracker = "checkpoints/latest_checkpointed_iteration.txt"
    cases = [
        ("cut-shard", f"{shard} is cut short", h.damage("__0_0.distcp", "cut"), older),
        ("cut-shard1", f"{shard} is cut short", h.damage("__1_0.distcp", "byte"), older),
        ("empty-shard", f"{shard} is empty", h.damage("__1_0.distcp", "empty"), older),
        ("no-shard", f"{shard} is missing", h.damage("__0_0.distcp", "remove"), older),
        ("no-shards", f"{shard} is missing", h.damage("*.distcp", "remove"), older),
        ("no-metadata", "`.metadata` is missing", h.damage(".metadata", "remove"), older),
        ("empty-metadata", "`.metadata` is damaged", h.damage(".metadata", "empty"), older),
        ("half-metadata", "`.metadata` is damaged", h.damage(".metadata", "half"), older),
        ("garbage-metadata", "`.metadata` is damaged", h.damage(".metadata", "garbage"), older),
        ("no-metadata-json", "`metadata.json` is missing", h.damage("metadata.json", "remove"), older),
        ("empty-checkpoint", "a checkpoint is empty", h.damage("*", "remove"), older),
        ("no-checkpoint", "the tracker names a checkpoint that is not there", h.damage("", "remove"), older),
        (
            "two-bad",
            "the two newest checkpoints are incomplete",
            h.both(h.damage(".metadata", "remove"), h.damage("__1_0.distcp", "cut", -2)),
            4,
        ),
        ("stale-tracker", "the tracker names an older checkpoint", h.write(tracker, "8"), older),
        ("stale-tracker-4", "the tracker names an older checkpoint", h.write(tracker, "4"), 4),
        ("tracker-nothing", "the tracker names a step never saved", h.write(tracker, "5000"), newest),
        ("tracker-garbage", "the tracker holds garbage", h.write(tracker, b"\xff\x00\x7f garbage"), newest),
        ("tracker-words", "the tracker holds garbage", h.write(tracker, "twelve"), newest),
        ("tracker-empty", "the tracker is empty", h.file(tracker, "empty"), newest),
        ("tracker-missing", "the tracker is missing", h.file(tracker, "remove"), newest),
        ("tracker-newline", "the tracker ends with a newline", h.write(tracker, "12\n"), newest),
        (
            "half-save",
            "a newer checkpoint is half there",
            h.write("checkpoints/iter_0000016/__0_0.distcp", bytes(5000)),
            newest,
        ),
    ]
    trained = (
        "cut-shard",
        "no-metadata",
        "two-bad",
        "stale-tracker-4",
        "tracker-garbage",
        "tracker-missing",
        "half-save",
    )
    stops = [
        ("all-gone", "all checkpoints are gone", h.file("checkpoints", "remove"), gone),
        (
            "all-bad",
            "no checkpoint is complete",
            h.both(*(h.damage(".metadata", "remove", which) for which in range(3))),
            gone,
        ),
        ("batch", "the batch is changed", h.option("--global-batch-size", "8"), "global_batch_size"),
        ("schedule", "the schedule is changed", h.option("--lr-decay-iters", "100"), "lr_decay_iters"),
        (
            "layout",
            "the layout is changed",
            h.option("--expert-model-parallel-size", "1"),
            "expert_model_parallel_size",
        ),
    ]
    return [
        *(at_rest(name, fault, harm, step=step, trains=name in trained) for name, fault, harm, step in cases),
        *(at_rest(name, fault, harm, "stops", says=says) for name, fault, harm, says in stops),
        between("cut-between", f"{shard} is cut short", h.damage("__0_0.distcp", "cut")),
        between("tracker-between", "the tracker is empty", h.file(tracker, "empty")),
        at_rest("late-bad", f"{shard} is missing", h.damage("__1_0.distcp", "remove"), start="late", step=56),
    ]


def files() -> list[Case]:
    half, metrics = '{"time": 17', "attempts/1/metrics.jsonl"
    quick = {"step": 12, "trains": False}
    return [
        at_rest("half-decision", "decision.json is half written", h.write("decision.json", half), step=12),
        at_rest(
            "half-own", "an attempt's decision.json is half written", h.write("attempts/1/decision.json", half), **quick
        ),
        at_rest("half-end", "end.json is half written", h.write("attempts/1/end.json", half), **quick),
        at_rest("no-end", "end.json is missing", h.file("attempts/1/end.json", "remove"), start="late", step=56),
        at_rest("half-exit", "a rank's record is half written", h.write("attempts/1/exit/rank0.json", half), **quick),
        at_rest("half-metrics", "metrics.jsonl ends in half a line", h.file(metrics, "cut"), **quick),
        at_rest("empty-attempt", "an attempt left nothing", h.write("attempts/2/train.log", ""), step=12),
        at_rest("stray", "strange names lie in attempts/", h.write("attempts/old.bak/x", ""), **quick),
    ]


def failures() -> list[Case]:
    often = "3 attempts in a row ended so"
    keep = {"keep": True, "attempt": None}
    boom = "raise boom 17 at 0x7f"

    def ever(point: str, do: str = boom) -> tuple[Plan, ...]:
        return ({**held(point), "do": do, **keep},)

    def forever(name: str, fault: str, point: str, start: str, **more: object) -> Case:
        return Case(name, fault, POINTS[point], "stops", plans=ever(point), start=start, attempts=3, says=often, **more)  # type: ignore[arg-type]

    def nan(do: str = "nan", **more: object) -> Plan:
        return {"point": "step", "rank": 1, "do": do, **more}

    def renamed(*attempts: int) -> tuple[Plan, ...]:
        return tuple({"point": "begin", "rank": 1, "do": "name n2", "attempt": attempt} for attempt in attempts)

    at_15 = nan(iteration=15, **keep)
    return [
        *inside(
            "error", "an unknown exception", "begin load step shards metadata tracker validation", boom, says="boom"
        ),
        *inside("exit", "a rank ends with code 3", "step", "exit 3", says="SystemExit: 3"),
        *inside("vanish", "a rank ends without a word", "step", "vanish 0"),
        *inside("segv", "SIGSEGV of a rank", "step validation", "signal 11", says="signal 11"),
        *inside("abort", "SIGABRT of a rank", "shards", "signal 6", says="signal 6"),
        *inside(
            "memory",
            "out of memory (torch.OutOfMemoryError)",
            "load step validation",
            "memory",
            "stops",
            says="rank 1 ran out of memory",
        ),
        *inside("ill", "SIGILL of a rank (132)", "begin step", "signal 4", "stops", says="instruction"),
        *inside("argparse", "exit 2 of a rank", "load", "exit 2", "stops", says="refuses its arguments"),
        at_rest(
            "argument",
            "argparse refuses an argument",
            h.option("--no-such-option", "1"),
            "stops",
            attempts=2,
            says="no-such-option",
        ),
        forever("ever-begin", "fails at once, forever", "begin", "early"),
        forever("ever-first", "fails at once, forever", "first", "first"),
        forever("ever-step", "the same failure at the same step, thrice", "step", "early"),
        at_rest(
            "ever-shell",
            "fails at once, forever",
            h.write("environment.sh", "echo no such module >&2\nexit 1\n"),
            "stops",
            attempts=4,
            says=often,
        ),
        at_rest(
            "cap",
            "the cap over all attempts",
            h.write("retry.json", '{"requeue": true, "max_attempts": 1, "world": 2, "ranks_per_node": 1}'),
            "stops",
            says="resilience.max_attempts",
        ),
        Case(
            "cap-2",
            "the cap over all attempts",
            POINTS["begin"],
            "stops",
            h.kill_rank(1),
            (held("begin"),),
            "early",
            h.write("retry.json", '{"requeue": true, "max_attempts": 2, "world": 2, "ranks_per_node": 1}'),
            says="resilience.max_attempts",
        ),
        Case(
            "nan-16-17",
            "NaN on one rank: 16, then 17",
            POINTS["step"],
            "stops",
            plans=(at_15,),
            start="early",
            attempts=2,
            says="exit 17",
        ),
        Case(
            "nan-gpu-16-17",
            "NaN on one node: 16, then 17",
            POINTS["step"],
            "stops",
            plans=(nan(iteration=15, node="n2", **keep),),
            start="early",
            attempts=2,
            says="exit 17",
        ),
        Case(
            "nan-16-16-17",
            "NaN on one rank: 16, 16 (the same node), then 17",
            POINTS["step"],
            "stops",
            plans=(at_15, *renamed(3)),
            start="early",
            attempts=3,
            says="exit 17",
        ),
        Case(
            "nan-16-16-16",
            "NaN on one rank: 16 three times",
            POINTS["step"],
            "stops",
            plans=(at_15, *renamed(3, 4)),
            start="early",
            attempts=3,
            says="3rd time in a row",
        ),
        Case(
            "nan-once",
            "NaN once, not reproduced: 17",
            POINTS["step"],
            "stops",
            plans=(nan(iteration=15),),
            start="early",
            says="exit 17",
        ),
        Case(
            "first-kill",
            "SIGKILL of a rank, nothing saved yet",
            POINTS["step"],
            "begins",
            h.kill_rank(1),
            (held("step"),),
            "first",
        ),
        Case(
            "first-told",
            "scancel --batch --signal=TERM, nothing saved yet",
            POINTS["step"],
            "resumes",
            h.scancel("--batch", "--signal=TERM", settle_s=2),
            (held("step"),),
            "first",
        ),
    ]


CASES = [*processes(), *nodes(), *the_job(), *slurm(), *disk(), *checkpoints(), *files(), *failures()]
"""All of them; names are unique (a test)."""
assert len({case.name for case in CASES}) == len(CASES)
