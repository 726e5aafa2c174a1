"""Faults of what lies in a run: its checkpoints, and what its attempts wrote down."""

from __future__ import annotations

from faults import harm as h
from faults.points import at_rest, between
from faults.trial import Case


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
        at_rest("late-bad", f"{shard} is missing", h.damage("__1_0.distcp", "remove"), start="late", step=52),
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
