"""Interrupted, killed, failed, doubled and finished launches: what they leave, what they say, how they go on."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

import pytest
from launched import SAVE_INTERVAL, SHORT, STEPS, Launch, Launched

from moekit.launch.rundir import data_dir
from moekit.watch.metrics import MetricsReader

pytestmark = [pytest.mark.megatron, pytest.mark.train, pytest.mark.timeout(4000)]

TIMINGS = ("iteration-time", "throughput", "peak_rss_gib", "peak_rss_rank")
SMALL = """
base: quickstart
train: {iters: 12}
schedule: {decay_iters: 40, warmup_iters: 4}
checkpoint: {save: null, save_interval: null}
monitor: {tokens_per_expert_interval: null}
log: {interval: 2}
"""


@dataclass
class Story:
    """One run: killed with its launch, gone on with, launched a second time meanwhile, stopped by Ctrl-C."""

    killed: Launched
    resumed: Launched
    second_code: int
    second_text: str
    interrupt_code: int
    listeners: set[str]


@pytest.fixture(scope="session")
def story(trained: Launched, launch: Launch) -> Story:
    killed = launch("story")
    killed.wait_for_step(SAVE_INTERVAL + 5)
    listeners = killed.listeners()
    assert killed.signal(signal.SIGKILL) == -signal.SIGKILL
    killed.assert_nothing_is_left(listeners)
    resumed = launch("story")
    resumed.wait_for_step(SAVE_INTERVAL + 2)
    second = launch("story")
    second_code = second.wait()
    resumed.wait_for_step(SAVE_INTERVAL + 20)
    listeners |= resumed.listeners()
    return Story(killed, resumed, second_code, second.text, resumed.signal(signal.SIGINT), listeners)


def values(launched: Launched, attempt: int) -> dict[int, dict[str, float]]:
    """What one attempt logged, by step, without what measures time or memory."""
    found: dict[int, dict[str, float]] = {}
    for step in MetricsReader(launched.run.path).poll():
        if step.attempt == attempt:
            kept = {name: value for name, value in step.metrics.items() if name not in TIMINGS}
            found.setdefault(step.step, {}).update(kept)
    return found


def test_resume_continues_the_uninterrupted_run_exactly(trained: Launched, story: Story) -> None:
    whole, resumed = values(trained, 1), values(story.resumed, 2)
    assert min(resumed) == SAVE_INTERVAL + 1
    assert max(resumed) >= SAVE_INTERVAL + 20
    assert resumed == {step: whole[step] for step in resumed}
    assert "moe/load_balancing_loss_layer_3" in whole[SAVE_INTERVAL + 1]  # the comparison has something to compare


def test_resume_says_where_it_goes_on(story: Story) -> None:
    assert f"resume    from the checkpoint of iteration {SAVE_INTERVAL}, as attempt 2" in story.resumed.text
    assert f"{STEPS - SAVE_INTERVAL} iterations of 4,096 tokens" in story.resumed.text


def test_a_second_launch_is_refused(story: Story) -> None:
    assert story.second_code == 1
    assert "run `story` is being launched already, by process" in story.second_text
    assert "--name" in story.second_text
    assert "Traceback" not in story.second_text


def test_ctrl_c_leaves_nothing_and_says_how_to_go_on(story: Story) -> None:
    assert story.interrupt_code == 130
    assert story.listeners  # there was something to give back
    story.resumed.assert_nothing_is_left(
        story.listeners, within_s=0
    )  # its exit was waited for, so nothing is left by then
    ending = story.resumed.text.splitlines()[-2:]
    assert ending[0] == "stopped; no process is left"
    assert ending[1] == f"the same command goes on from the checkpoint of iteration {SAVE_INTERVAL}"
    assert "Traceback" not in story.resumed.text


def test_a_finished_run_is_shown_again(trained: Launched, launch: Launch) -> None:
    began = time.monotonic()
    again = launch("trained")
    assert again.wait() == 0
    assert time.monotonic() - began < 20
    assert "run `trained` is finished" in again.text
    assert "--name" in again.text
    summary = trained.text[trained.text.index("  trained  finished at") :]
    assert again.text.endswith(summary)
    assert trained.run.numbers() == [1]


def test_success_leaves_nothing(trained: Launched) -> None:
    trained.assert_nothing_is_left(within_s=0)


def test_another_recipe_does_not_take_the_name(trained: Launched, launch: Launch, root: object) -> None:
    other = launch("trained", SHORT.replace("save_interval: 40", "save_interval: 50"))
    assert other.wait() == 1
    assert "run `trained` is that of another recipe, or of this one before it was changed" in other.text
    (trained.run.path.parents[2] / "trained.yaml").write_text(SHORT)


def test_a_killed_worker_fails_the_run(trained: Launched, launch: Launch) -> None:
    launched = launch("worker", SMALL)
    launched.wait_for_step(3)
    workers, listeners = launched.workers(), launched.listeners()
    assert len(workers) == 2
    os.kill(workers[1], signal.SIGKILL)
    assert launched.wait() == 1
    launched.assert_nothing_is_left(listeners, within_s=0)
    cause = "training failed: rank 1 was killed (SIGKILL): most often the machine was out of memory"
    assert cause in launched.text
    assert "runs/worker/attempts/1/train.log" in launched.text
    assert "Traceback" not in launched.text
    again = launch("worker", SMALL)
    assert again.wait() == 0, again.text
    assert "from the beginning, as attempt 2: the last one left no checkpoint" in again.text
    assert "finished at iteration 12 of 12, in 2 attempts" in again.text


def test_pipeline_stages_train_without_max_vio(trained: Launched, launch: Launch) -> None:
    stages = "train: {iters: 2}\nparallel: {pipeline_model: 2, expert_model: 1}\n"
    launched = launch("stages", SMALL.replace("train: {iters: 12}\n", stages))
    assert launched.wait() == 0, launched.text
    assert launched.text.count("each pipeline stage numbers its own from 0") == 2  # in the display, in the summary
    assert "finished at iteration 2 of 2" in launched.text


def test_a_failure_names_its_first_cause(trained: Launched, launch: Launch) -> None:
    folder = data_dir(trained.run.path.parents[1], "gone")
    folder.mkdir()
    (folder / "data-args.txt").write_text(f"{folder}/not_tokens\n")
    for ending in (".bin", ".idx"):
        (folder / f"not_tokens{ending}").write_bytes(b"text, not tokens " * 10)
    launched = launch("failing", SMALL + "data: {name: gone}\n")
    assert launched.wait() == 1
    launched.assert_nothing_is_left(within_s=0)
    cause = launched.text.split("training failed: ")[1].splitlines()[0]
    assert re.match(r"rank [01]: \w+(Error|Exception): .*not_tokens", cause)
    assert "Traceback" not in launched.text


def test_a_training_without_training_is_no_success(trained: Launched, launch: Launch) -> None:
    """Megatron itself exits with 0 here."""
    for _ in range(2):
        launched = launch("empty", SMALL + "megatron: {extra: [--skip-train]}\n")
        assert launched.wait() == 1
        assert "training failed: Megatron ended without training" in launched.text


def test_a_torchrun_of_its_own_is_not_needed_after_sigkill(trained: Launched, launch: Launch) -> None:
    """SIGKILL while Megatron is still being imported, before any handler stands."""
    launched = launch("early", SMALL)
    while len(launched.processes()) < 3:
        assert launched.process.poll() is None, launched.text
        time.sleep(0.02)
    assert launched.signal(signal.SIGKILL) == -signal.SIGKILL
    launched.assert_nothing_is_left()


def test_the_first_line_comes_within_a_second(root: object, trained: Launched) -> None:
    """Measured without what Python itself takes on a busy machine."""
    folder = trained.run.path.parents[2]
    bare = time.monotonic()
    subprocess.run([sys.executable, "-c", "pass"], check=True)
    bare = time.monotonic() - bare
    (folder / "first.yaml").write_text(SMALL)
    began = time.monotonic()
    command = [sys.executable, "-u", "-m", "moekit", "launch", "first.yaml"]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    first = process.stdout.readline()
    took = time.monotonic() - began
    process.kill()
    process.wait()
    process.stdout.close()
    assert first.startswith(b"first: 8 experts")
    assert took < 1.0 + 10 * bare
