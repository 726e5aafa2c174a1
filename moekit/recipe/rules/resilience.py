"""Rules on what a run is to survive, and on how it ends."""

from __future__ import annotations

from collections.abc import Iterator

from moekit.recipe.rules.violation import Rule, Target, Violation, below, variable
from moekit.recipe.schema import Recipe

_SIGNAL_LEAD_S = 300
"""Seconds before the time limit at which a job is told to save and end (`moekit.launch.script.SIGNAL_LEAD_S`)."""


def an_early_end_is_saved(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A run that ends before its steps are done is to go on later.

    Megatron, later: it ends, and what it trained is gone (megatron/training/training.py:3247, 3303).
    A warning, and none with `benchmark: true`: a measurement may end so.
    """
    if recipe.checkpoint.save or recipe.benchmark:
        return
    for name in ("exit_signal_handler", "exit_duration_in_mins"):
        if getattr(recipe.resilience, name):
            yield Violation(
                (f"resilience.{name}", "checkpoint.save"),
                f"`resilience.{name}` ends the run early, and without `checkpoint.save` nothing is left of it",
                "add `save: true` and a `save_interval` to `checkpoint`",
                "warning",
            )


def a_rerun_has_its_checkpoint(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Whether a wrong result is the GPU's or the model's, a second run of the step tells, on another GPU.

    Megatron, later: at the first NaN it wants to save that step, and stops on a TypeError
    (megatron/training/training.py:3871; handbook 3.6).
    A warning: until then it trains, and `validate_results` is also what it does unasked.
    """
    if recipe.resilience.rerun_mode == "validate_results" and not recipe.checkpoint.save and not recipe.benchmark:
        yield Violation(
            ("resilience.rerun_mode", "checkpoint.save"),
            "`resilience.rerun_mode: validate_results` saves a faulty step to rerun it, and needs `checkpoint.save`",
            "add `save: true` and a `save_interval` to `checkpoint`",
            "warning",
        )


def reports_have_a_rerun_mode(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """The option and the machine behind it call this mode by two names.

    Megatron, first step: `'report_stats' is not a valid RerunMode` (megatron/training/initialize.py:88).
    """
    if recipe.resilience.rerun_mode == "report_stats":
        yield Violation(
            ("resilience.rerun_mode",),
            "`resilience.rerun_mode: report_stats` passes Megatron's parser and stops its start",
            "use `validate_results` or `disabled`",
        )


def an_exit_signal_has_its_handler(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Which signal says nothing where none is waited for.

    Megatron, never: the signal ends the run unsaved (megatron/training/global_vars.py:149).
    """
    if recipe.resilience.exit_signal and not recipe.resilience.exit_signal_handler:
        yield Violation(
            ("resilience.exit_signal", "resilience.exit_signal_handler"),
            "`resilience.exit_signal` does nothing without `resilience.exit_signal_handler`",
            "add `exit_signal_handler: true`",
        )


def an_exit_signal_can_be_waited_for(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Two signals no process can catch.

    Megatron, first step: an OSError, `Invalid argument` (megatron/training/dist_signal_handler.py:68).
    """
    signal = recipe.resilience.exit_signal
    if recipe.resilience.exit_signal_handler and signal in _NEVER_CAUGHT:
        yield Violation(
            ("resilience.exit_signal",), f"no process can wait for `{signal}`", "`SIGTERM`, Megatron's default, is sent"
        )


_NEVER_CAUGHT = ("SIGKILL", "SIGSTOP")


def an_exit_signal_is_sent(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A launch has Slurm send the signal ahead of the time limit, and torchrun hand it on; some neither can.

    Megatron, never: such a signal does not come, and the job is killed unsaved (handbook 3.6).
    A warning: somebody may send it by hand.
    """
    signal = recipe.resilience.exit_signal
    if recipe.resilience.exit_signal_handler and signal not in (None, *_SENT, *_NEVER_CAUGHT):
        yield Violation(
            ("resilience.exit_signal",),
            f"`{signal}` cannot be sent ahead of the time limit",
            f"`SIGTERM`, Megatron's default, can; so can {', '.join(_SENT[1:])}",
            "warning",
        )


_SENT = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2")


def torchrun_waits_for_the_last_save(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """torchrun kills its ranks 30 seconds after a signal, unless `TORCH_ELASTIC_SHUTDOWN_TIMEOUT` says more.

    Megatron, later: the last save is cut off (torch/distributed/launcher/api.py; torch has the variable from 2.12 on).
    A warning: a small model is saved in time.
    """
    if not recipe.resilience.exit_signal_handler:
        return
    if below(target.torch, "2.12"):
        yield Violation(
            ("resilience.exit_signal_handler",),
            f"torch {target.torch} of {target.name} kills the ranks 30 seconds after the signal, done saving or not",
            "torch 2.12 and later wait longer; or end by `exit_duration_in_mins`",
            "warning",
        )
    waits = variable(_WAIT, recipe, target)
    if waits is not None and waits.isdecimal() and int(waits) < _SIGNAL_LEAD_S:
        yield Violation(
            (f"runtime.environment.{_WAIT}", "resilience.exit_signal_handler"),
            f"{_WAIT}={waits} leaves the last save {waits} seconds; the signal comes {_SIGNAL_LEAD_S} before the end",
            "unset it: a launch sets it",
            "warning",
        )


_WAIT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"


def a_run_ends_before_its_job(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """What ends a run in good order must come before Slurm does.

    Megatron, later: the job is killed unsaved, or told to end as it begins (moekit/launch/script.py).
    A warning: the run trains until then.
    """
    resilience, limit = recipe.resilience, recipe.runtime.time_limit_min
    if limit and resilience.exit_duration_in_mins and resilience.exit_duration_in_mins >= limit:
        yield Violation(
            ("resilience.exit_duration_in_mins", "runtime.time_limit_min"),
            f"`exit_duration_in_mins: {resilience.exit_duration_in_mins}` is not before the job's end, minute {limit}",
            "leave time for start and save",
            "warning",
        )
    if limit and resilience.exit_signal_handler and limit * 60 <= _SIGNAL_LEAD_S:
        yield Violation(
            ("runtime.time_limit_min", "resilience.exit_signal_handler"),
            f"the signal to save and end comes {_SIGNAL_LEAD_S // 60} minutes before the end of a job of {limit}",
            level="warning",
        )


def a_faulty_step_is_planned_anew(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """The checkpoint of a faulty step has more in it than others: what the second run needs.

    Megatron, later: a plan made for all checkpoints leaves that out, and the restart stops at `Missing key in
    checkpoint state_dict: rerun_state_machine_state` (state_dict_saver.py:110 of megatron/core/dist_checkpointing;
    Megatron-LM issue 4378).
    A warning: until a NaN it trains. The rerun is on where nothing is said.
    """
    checkpoint, mode = recipe.checkpoint, recipe.resilience.rerun_mode
    kept = checkpoint.save and checkpoint.assume_constant_structure and checkpoint.format in (None, "torch_dist")
    if kept and mode in (None, "validate_results") and not recipe.benchmark:
        yield Violation(
            ("checkpoint.assume_constant_structure", "resilience.rerun_mode"),
            "`checkpoint.assume_constant_structure` saves a faulty step without what its rerun needs",
            "unset it with `null`, or `resilience: {rerun_mode: disabled}`",
            "warning",
        )


def a_run_that_comes_back_has_saved(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """What a job goes on from when it is back out of the queue is its last checkpoint.

    Megatron, never: each start begins at the beginning, and none comes to its end (moekit/job/retry.py).
    """
    if recipe.resilience.requeue and not recipe.checkpoint.save:
        yield Violation(
            ("resilience.requeue", "checkpoint.save"),
            "`resilience.requeue` goes on from the last checkpoint, and without `checkpoint.save` there is none",
            "add `save: true` and a `save_interval` to `checkpoint`",
        )


def a_job_goes_back_before_its_end(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A job can put itself back into the queue while it has its nodes, and at the time limit it has them no more.

    Megatron, later: Slurm ends it, and what it trained since its last checkpoint is gone (moekit/launch/script.py).
    A warning: a run may end before that.
    """
    resilience = recipe.resilience
    told = resilience.exit_signal_handler or resilience.exit_duration_in_mins
    if resilience.requeue and recipe.checkpoint.save and not told:
        yield Violation(
            ("resilience.requeue", "resilience.exit_signal_handler"),
            "at its time limit Slurm ends the job for good, `resilience.requeue` or not, and nobody saves before",
            "add `exit_signal_handler: true`, and it is told to save and end ahead of that",
            "warning",
        )


RULES: tuple[Rule, ...] = (
    an_early_end_is_saved,
    a_rerun_has_its_checkpoint,
    reports_have_a_rerun_mode,
    an_exit_signal_has_its_handler,
    an_exit_signal_can_be_waited_for,
    an_exit_signal_is_sent,
    torchrun_waits_for_the_last_save,
    a_run_ends_before_its_job,
    a_faulty_step_is_planned_anew,
    a_run_that_comes_back_has_saved,
    a_job_goes_back_before_its_end,
)
