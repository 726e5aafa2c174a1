"""A recipe trained on this machine: its data prepared, torchrun started, shown and stopped.

The same command again goes on where it was interrupted, or shows what was trained. Nothing outlives a launch
(`guard.py`), and a run has one launch at a time (`processes.only_launch`). What is shown is read from the run's files.
Trackio is fed by a process of its own, without which training goes on just as well.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from moekit.job.hooks import end_iteration
from moekit.launch import needs
from moekit.launch.failure import ended_well, first_cause
from moekit.launch.live import Display, Follow, clock, rows_every
from moekit.launch.processes import environment, guarded, only_launch, torchrun, visible_gpus
from moekit.launch.rundir import PROJECT, RunDir, run_dir, run_files, write
from moekit.problems import MoekitError, error
from moekit.recipe.load import Loaded, show
from moekit.recipe.sizes import sizes

INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 + SIGINT."""
_POLL_S = 0.5


@dataclass(frozen=True)
class Plan:
    """One attempt: from which step, to which, by what."""

    loaded: Loaded
    run: RunDir
    shared_root: Path
    attempt: int
    start: int
    """The step it goes on from; 0 without a checkpoint."""
    end: int
    """The step after which it ends."""
    processes: int
    device: str
    tokens_per_step: int

    @property
    def has_router(self) -> bool:
        """Whether there are experts to watch."""
        return self.loaded.recipe.moe.num_experts is not None

    @property
    def command(self) -> list[str]:
        """torchrun and all its words, from the run directory."""
        file = self.run.argv_resume if self.start else self.run.argv_first
        entry = (self.run.job / "entry.py").relative_to(self.run.path)
        return [*torchrun(self.processes), str(entry), *file.read_text(encoding="utf-8").splitlines()]


def launch_local(loaded: Loaded, name: str, shared_root: Path) -> int:
    """Train a recipe here, as the run `name`; the exit code: 0, 1 when training failed, 130 after Ctrl-C.

    A run that was interrupted goes on from its last complete checkpoint, or begins anew without one. A finished run is
    shown again.

    Raises:
        MoekitError: with everything that keeps the recipe from being trained here; or the run's name is another
            recipe's, or it is being launched already.
    """
    run = run_dir(shared_root.absolute(), name)
    if found := needs.problems(loaded, shared_root, os.environ):
        raise MoekitError(*found)
    display = Display(loaded.recipe.moe.num_experts is not None)
    _make_folder(run)
    with only_launch(run.path) as lock:
        numbers = _continue_or_refuse(run, loaded, name)
        if numbers and ended_well(run.attempt(numbers[-1]).path, _processes(loaded)):
            again = "the same command shows it again, `--name NAME` trains another"
            display.say(f"run `{name}` is finished; {again}", "bold")
            _say_summary(run, loaded, display)
            return 0
        _write_missing(run, run_files(loaded, name, shared_root.absolute()))
        try:
            return _train(loaded, run, shared_root.absolute(), lock, display)
        except KeyboardInterrupt:
            return _say_interrupted(run, display)


def _make_folder(run: RunDir) -> None:
    try:
        run.path.mkdir(parents=True, exist_ok=True)
    except OSError as reason:
        raise error(f"`{run.path}` cannot be made: {(reason.strerror or str(reason)).lower()}") from None


def _continue_or_refuse(run: RunDir, loaded: Loaded, name: str) -> list[int]:
    """The attempts so far of a folder that is this recipe's run; none of a new one."""
    if not run.recipe.exists():
        return []
    other_name = "give this one another name with `--name`"
    provenance = json.loads(run.provenance.read_text()) if run.provenance.exists() else {}
    if provenance.get("cluster"):
        raise error(f"run `{name}` was launched on `{provenance['cluster']}`", other_name, str(run.path))
    if run.recipe.read_text(encoding="utf-8") != run_files(loaded, name, run.path.parents[1])["recipe.yaml"]:
        what = f"run `{name}` is that of another recipe, or of this one before it was changed"
        raise error(what, other_name, str(run.recipe))
    return run.numbers()


def _write_missing(run: RunDir, files: dict[str, str]) -> None:
    """Write what is not there, or was written by another moekit."""
    wanted = {
        name: text
        for name, text in files.items()
        if not (run.path / name).exists() or (run.path / name).read_text(encoding="utf-8") != text
    }
    if wanted:
        write(run.path, wanted)


def _train(loaded: Loaded, run: RunDir, shared_root: Path, lock: int, display: Display) -> int:
    """One attempt, from the data to the summary."""
    _say_what(loaded, run, display)
    data = _prepare_data(loaded, shared_root, display)
    plan = _plan(loaded, run, shared_root)
    _say_start(plan, display)
    began = time.monotonic()
    with _trackio(run, display):
        code, validation_loss = _watch(plan, lock, display)
    folder = run.attempt(plan.attempt)
    if code != 0 or not ended_well(folder.path, plan.processes):
        display.say("")
        display.say(f"training failed: {first_cause(folder.path, plan.processes)}", "bold red")
        display.say(f"    everything it printed: {show(folder.train_log)}")
        return 1
    display.say("")
    display.say(f"trained to step {plan.end} in {clock(time.monotonic() - began)}", "bold")
    if validation_loss is not None:
        _say_validation(validation_loss, data, loaded, display)
    _say_summary(run, loaded, display)
    return 0


def _watch(plan: Plan, lock: int, display: Display) -> tuple[int, float | None]:
    """Run the attempt and show it; torchrun's exit code, and the last validation loss in nats."""
    recipe, folder = plan.loaded.recipe, plan.run.attempt(plan.attempt)
    env = environment(
        plan.device,
        plan.processes,
        plan.attempt,
        recipe.monitor.routing_trace_last_iters,
        recipe.runtime.environment or {},
        os.environ,
    )
    follow = Follow(
        plan.run.path, plan.attempt, plan.end, plan.tokens_per_step, rows_every(recipe.log.interval or 1, plan.end)
    )
    rows = 0
    with (
        display.moving("Megatron is starting", plan.end),
        guarded(plan.command, plan.run.path, env, folder.train_log, lock) as process,
    ):
        running = True
        while running:
            running = process.poll() is None  # before the files are read: what was written last is read too
            for row in follow.poll():
                if not rows:
                    display.header()
                rows += 1
                display.row(row, plan.end)
            if follow.step:
                closing = follow.step == plan.end
                text = "saving and validating" if closing else f"step {follow.step} of {plan.end}"
                display.move(text, follow.step, follow.left_s)
            if running:
                time.sleep(_POLL_S)
    return process.returncode, follow.validation_loss


def _plan(loaded: Loaded, run: RunDir, shared_root: Path) -> Plan:
    """The next attempt; its folder is made."""
    recipe, size = loaded.recipe, sizes(loaded.recipe)
    if size is None:
        what = "a run needs `parallel.gpus`, `train.micro_batch_size`, `train.global_batch_size` and `model.seq_length`"
        raise error(what, where=loaded.source.shown)
    total = recipe.train.iters or (recipe.train.samples or 0) // size.global_batch_seqs
    start = _checkpointed_step(run) if recipe.checkpoint.save else 0
    return Plan(
        loaded=loaded,
        run=run,
        shared_root=shared_root,
        attempt=run.new_attempt(),
        start=start,
        end=end_iteration(start, total, recipe.train.exit_interval),
        processes=_processes(loaded),
        device=recipe.runtime.device or "gpu",
        tokens_per_step=size.tokens_per_step,
    )


def _processes(loaded: Loaded) -> int:
    return loaded.recipe.parallel.gpus or 1


def _checkpointed_step(run: RunDir) -> int:
    """The step of the last complete checkpoint, which Megatron names once it is whole; 0 without one."""
    if not run.latest_checkpoint.exists():
        return 0
    text = run.latest_checkpoint.read_text().strip()
    return int(text) if text.isdecimal() and (run.checkpoints / f"iter_{int(text):07}").is_dir() else 0


def _prepare_data(loaded: Loaded, shared_root: Path, display: Display) -> Path | None:
    """Tokenize the text that comes with moekit, at its first use; its prefix, None where the recipe does not use it."""
    if needs.PREPARED_DATA not in (loaded.recipe.data.name, loaded.recipe.data.tokenizer):
        return None
    from moekit.data.quickstart import prepare_python_docs

    with display.moving("preparing data", None):
        prepared = prepare_python_docs(shared_root, lambda text: display.fact("data", text))
    done = "already prepared" if prepared.already else f"prepared in {prepared.seconds:.0f} s"
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
        display.fact("device", "the CPU, as `runtime.device` says, though there is a GPU; `device: gpu` would use it")


def _say_start(plan: Plan, display: Display) -> None:
    version, many = plan.loaded.recipe.megatron.version, plan.processes > 1
    on = "the CPU" if plan.device == "cpu" else f"{plan.processes} GPU{'s' * many}"
    if plan.device == "cpu":
        needed_gib = needs.MEMORY_GIB_PER_PROCESS * plan.processes
        display.fact("needs", f"about {needed_gib:.0f} GiB of memory, {needs.DISK_GIB:.0f} GiB of disk")
        if warning := needs.memory_warning(plan.loaded):
            display.fact("warning", warning)
    if plan.start:
        display.fact("resume", f"from the checkpoint of step {plan.start}, as attempt {plan.attempt}")
    elif plan.attempt > 1:
        display.fact("restart", f"from the beginning, as attempt {plan.attempt}: the last one left no checkpoint")
    steps = f"{plan.end - plan.start} steps of {plan.tokens_per_step:,} tokens"
    display.fact("training", f"starting Megatron {version} on {on} with {plan.processes} process{'es' * many}, {steps}")
    display.fact("log", show(plan.run.attempt(plan.attempt).train_log))
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
    step = _checkpointed_step(run)
    from_where = f"from the checkpoint of step {step}" if step else "from the beginning: there is no checkpoint yet"
    display.say("stopped; no process is left", "bold")
    display.say(f"the same command goes on {from_where}")
    return INTERRUPTED
