"""A recipe trained on this machine: its data prepared, torchrun started, shown and stopped.

The same command again goes on where it was interrupted, or shows what was trained. Nothing outlives a launch
(`guard.py`), and a run has one launch at a time (`processes.only_launch`). What is shown is read from the run's files.
Trackio is fed by a process of its own, without which training goes on just as well.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from moekit.job.endings import ended_well, first_cause
from moekit.launch import data_there, docker, needs
from moekit.launch.attempt import Plan, is_finished, next_attempt, watch
from moekit.launch.folders import write
from moekit.launch.live import Display, Follow, clock
from moekit.launch.processes import only_launch, visible_gpus
from moekit.launch.run_files import PROJECT, is_of, run_files
from moekit.launch.rundir import RunDir, checkpointed_step, run_dir
from moekit.problems import MoekitError, Problem, error, print_problems
from moekit.recipe.load import Loaded, show

if TYPE_CHECKING:
    from moekit.launch.docker import Container

INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 + SIGINT."""


def launch_local(
    loaded: Loaded,
    name: str,
    shared_root: Path,
    display: Display | None = None,
    container: Container | None = None,
    found: Sequence[Problem] | None = None,
) -> int:
    """Train a recipe here, as the run `name`; the exit code: 0, 1 when training failed, 130 after Ctrl-C.

    A run that was interrupted goes on from its last complete checkpoint, or begins anew without one. A finished run is
    shown again. A `display` that is brief is for a run that is part of something else: how it goes is shown, not what
    it came to, and its metrics stay in its files. In a `container`, what that needs was `found` by whoever made it.

    Raises:
        MoekitError: with everything that keeps the recipe from being trained here; or the run's name is another
            recipe's, or it is being launched already.
    """
    run = run_dir(shared_root.absolute(), name)
    found = needs.problems(loaded, shared_root, os.environ) if found is None else list(found)
    if errors := [problem for problem in found if problem.level == "error"]:
        raise MoekitError(*errors)
    display = display or Display(loaded.recipe.moe.num_experts is not None)
    print_problems(found)
    _make_folder(run)
    with only_launch(run.path) as lock:
        _refuse_another(run, loaded, name)
        if is_finished(loaded, run):
            if display.brief:
                display.say(f"{name}: trained already, in {show(run.path)}", "bold")
                return 0
            again = "the same command shows it again, `--name NAME` trains another"
            display.say(f"run `{name}` is finished; {again}", "bold")
            _say_summary(run, loaded, display)
            return 0
        _write_missing(run, run_files(loaded, name, shared_root.absolute()))
        try:
            return _train(loaded, run, shared_root.absolute(), lock, display, container)
        except KeyboardInterrupt:
            return _say_interrupted(run, display)


def _make_folder(run: RunDir) -> None:
    try:
        run.path.mkdir(parents=True, exist_ok=True)
    except OSError as reason:
        raise error(f"`{run.path}` cannot be made: {(reason.strerror or str(reason)).lower()}") from None


def _refuse_another(run: RunDir, loaded: Loaded, name: str) -> None:
    """Refuse a folder that is a run already, of another recipe or on a cluster."""
    if not run.recipe.exists():
        return
    other_name = "give this one another name with `--name`"
    provenance = json.loads(run.provenance.read_text()) if run.provenance.exists() else {}
    if provenance.get("cluster"):
        raise error(f"run `{name}` was launched on `{provenance['cluster']}`", other_name, str(run.path))
    if not is_of(run, loaded.recipe):
        what = f"run `{name}` is that of another recipe, or of this one before it was changed"
        raise error(what, other_name, str(run.recipe))


def _write_missing(run: RunDir, files: dict[str, str]) -> None:
    """Write what is not there, or was written by another moekit."""
    wanted = {
        name: text
        for name, text in files.items()
        if not (run.path / name).exists() or (run.path / name).read_text(encoding="utf-8") != text
    }
    if wanted:
        write(run.path, wanted)


def _train(
    loaded: Loaded, run: RunDir, shared_root: Path, lock: int, display: Display, container: Container | None
) -> int:
    """One attempt, from the data to the summary."""
    began = time.monotonic()
    _say_what(loaded, run, display)
    data = _prepare_data(loaded, shared_root, display)
    plan = next_attempt(loaded, run, container)
    _say_start(plan, display)
    with docker.alone(container), nullcontext() if display.brief else _trackio(run, display):
        followed = watch(plan, lock, display)
    if not display.brief:
        display.say("")
    if cause := _failure(plan, followed):
        display.say(f"training failed: {cause}", "bold red")
        display.say(f"everything it printed is in {show(run.attempt(plan.attempt).train_log)}; {_how_to_go_on(run)}")
        return 1
    if not is_finished(loaded, run):
        display.say(f"stopped early, after iteration {followed.step}, as it was asked to", "bold")
        display.say(_how_to_go_on(run))
        return 0
    if display.brief:
        display.say(f"  done in {clock(time.monotonic() - began)}")
        return 0
    display.say(f"done in {clock(time.monotonic() - began)}, from the first line to this one", "bold")
    if followed.validation_loss is not None:
        _say_validation(followed.validation_loss, data, loaded, display)
    _say_summary(run, loaded, display)
    return 0


def _failure(plan: Plan, followed: Follow) -> str | None:
    """What went wrong, or None."""
    folder = plan.run.attempt(plan.attempt).path
    if not ended_well(folder, plan.processes):
        return first_cause(folder, plan.processes)
    if not followed.step and plan.start < plan.end:
        return "Megatron ended without training, as it does when `data.split` leaves nothing to train on"
    return None


def _prepare_data(loaded: Loaded, shared_root: Path, display: Display) -> Path | None:
    """Make what of a run's data and tokenizer comes with moekit, at its first use; the data's prefix if they do."""
    if said := data_there.said_of_epochs(loaded, shared_root):
        display.fact("data", said)
    if data_there.PREPARED_DATA not in (loaded.recipe.data.name, loaded.recipe.data.tokenizer):
        return None
    from moekit.data.quickstart import prepare_python_docs, prepare_tokenizer

    def progress(text: str) -> None:
        display.fact("data", text)

    if loaded.recipe.data.name != data_there.PREPARED_DATA:
        prepare_tokenizer(shared_root, progress)
        return None
    with display.moving("preparing data", None):
        prepared = prepare_python_docs(shared_root, progress)
    done = "already prepared" if prepared.already else f"prepared in {prepared.seconds:.0f} s"
    if not (display.brief and prepared.already):
        display.fact("data", f"{prepared.tokens:,} tokens in {prepared.documents} documents, {done}")
    return prepared.prefix


@contextmanager
def _trackio(run: RunDir, display: Display) -> Iterator[None]:
    """Feed Trackio, where it is installed, while the block runs."""
    from moekit.track import follower

    try:
        process = follower.start(run.path, PROJECT)
    except MoekitError as missing:
        problem = missing.problems[0]
        display.fact("metrics", f"in files only, since {problem.what}: {problem.hint}")
        yield
        return
    try:
        yield
    finally:
        if not follower.stop(process):
            display.say(f"Trackio did not take all metrics; why is in {show(run.path / 'track.log')}")


def _say_what(loaded: Loaded, run: RunDir, display: Display) -> None:
    summary = f": {loaded.recipe.summary}" if loaded.recipe.summary else ""
    display.say(f"{run.path.name}{summary}", "bold")
    display.fact("run", show(run.path))
    if loaded.recipe.runtime.device == "cpu" and visible_gpus(os.environ):
        recipe = "`settings/quickstart_gpu` is the quickstart on it"
        display.fact("device", f"the CPU, as `runtime.device` says, though there is a GPU: {recipe}")


def _say_start(plan: Plan, display: Display) -> None:
    version, many = plan.loaded.recipe.megatron.version, plan.processes > 1
    on = "the CPU" if plan.device == "cpu" else f"{plan.processes} GPU{'s' * many}"
    if plan.device == "cpu":
        needed_gib = needs.MEMORY_GIB_PER_PROCESS * plan.processes
        display.fact("needs", f"about {needed_gib:.0f} GiB of memory, {needs.DISK_GIB:.0f} GiB of disk")
        if warning := needs.memory_warning(plan.loaded):
            display.fact("warning", warning)
    for sentence in plan.said:
        display.fact("warning", sentence)
    if plan.resumes:
        display.fact("resume", f"from the checkpoint of iteration {plan.start}, as attempt {plan.attempt}")
    elif plan.attempt > 1:
        display.fact("restart", f"from the beginning, as attempt {plan.attempt}: the last one left no checkpoint")
    left = plan.end - plan.start
    steps = f"{left:,} iteration{'s' * (left != 1)} of {plan.tokens_per_step:,} tokens"
    display.fact("training", f"starting Megatron {version} on {on} with {plan.processes} process{'es' * many}, {steps}")
    if plan.container:
        display.fact("image", plan.container.image)
    display.fact("log", show(plan.run.attempt(plan.attempt).train_log))
    if not display.brief:
        display.say("")


def _say_validation(loss: float, data: Path | None, loaded: Loaded, display: Display) -> None:
    """The loss, and for the text that comes with moekit what a model without context would reach."""
    from moekit.data.shards import held_out_unigram_entropy_nats

    text = f"validation loss {loss:.3f} nats"
    if data and loaded.recipe.data.split:
        entropy = held_out_unigram_entropy_nats(data, loaded.recipe.data.split)
        text += f" on pages it never saw; knowing only how often each token occurs would give {entropy:.3f}"
    display.say(text)


def _say_summary(run: RunDir, loaded: Loaded, display: Display) -> None:
    from moekit.watch.render import render_summary
    from moekit.watch.summary import load_summary

    display.say("")
    display.text(render_summary(load_summary(Path(show(run.path)), loaded.source.shown), display.width))


def _say_interrupted(run: RunDir, display: Display) -> int:
    display.say("")
    display.say("stopped; no process is left", "bold")
    display.say(_how_to_go_on(run))
    return INTERRUPTED


def _how_to_go_on(run: RunDir) -> str:
    if step := checkpointed_step(run):
        return f"the same command goes on from the checkpoint of iteration {step}"
    return "the same command begins anew, since there is no checkpoint yet"
