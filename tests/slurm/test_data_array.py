"""A data set tokenized by arrays of a real Slurm: whatever ends an element, the same command again finishes the shards,
and their bytes are those of a run on one machine."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster

pytestmark = pytest.mark.slurm

END = "<|end|>"
WORDS = ("some", "words", "of", "a", "few", "letters", "over", "and", "over", "ünd", "zwölf")
PATIENCE_S = 240.0


@pytest.fixture(autouse=True)
def _nothing_left(slurm: Cluster) -> Iterator[None]:
    yield
    slurm.call("scancel", "--user=root")
    slurm.call("scontrol", "update", "PartitionName=cpu", "State=UP")


def make_tokenizer(shared_root: Path) -> None:
    """A tokenizer of some hundred ids, as `tiny`."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(["some words of a few letters, over and over"] * 9, trainer)
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    folder = shared_root / "tokenizers/tiny"
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))


def text_file(path: Path, kib: int) -> None:
    choose, words = random.Random(path.name), WORDS
    with path.open("w") as file:
        for number in range(kib):
            text = " ".join(choose.choices(words, k=180))
            file.write(json.dumps({"id": f"{path.name}/{number}", "text": text}) + "\n")


def describe(folder: Path, name: str, tasks: int, large: tuple[int, ...] = (), **more: Any) -> Path:
    """A description of as many tasks, each of two files; the second one of some tasks is large."""
    source = folder / "text"
    source.mkdir(parents=True)
    for task in range(tasks):
        text_file(source / f"0-{task}.jsonl", 20)
        text_file(source / f"1-{task}.jsonl", 5000 if task in large else 20)
    said = {"name": name, "source": ["text"], "tokenizer": "tiny", "end_of_document": END, "tasks": tasks, **more}
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(said))
    return path


def elements(slurm: Cluster, job: str) -> dict[int, str]:
    said = slurm.call("squeue", "-h", "-r", "-t", "all", "-j", job, "-O", "ArrayTaskID:|,State:|").stdout
    fields = [line.split("|") for line in said.splitlines()]
    return {int(index): state.strip() for index, state, *_ in fields}


def until_ended(slurm: Cluster, job: str) -> dict[int, str]:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        states = elements(slurm, job)
        if states and not {*states.values()} & {"PENDING", "RUNNING", "COMPLETING", "REQUEUED"}:
            return states
        assert time.monotonic() < deadline, states
        time.sleep(0.2)


def until_there(path: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.02)


def status(slurm: Cluster, *words: str | Path) -> dict[str, Any]:
    done = slurm.moekit("data", "status", *words, "--json")
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def bytes_of(folder: Path) -> dict[str, str]:
    pairs = [path for path in folder.iterdir() if path.suffix in (".bin", ".idx")]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in pairs}


def submit(slurm: Cluster, *words: str | Path) -> dict[str, Any]:
    done = slurm.moekit("data", "tokenize", *words, "--on", "slurm", "--json")
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def damage(path: Path) -> bytes:
    """Break a line, so that the size and the time of writing stay; what it was."""
    was, at = path.read_bytes(), path.stat().st_mtime_ns
    path.write_bytes(b"#" + was[1:])
    os.utime(path, ns=(at, at))
    return was


def test_whatever_ends_an_element_the_same_command_finishes_the_shards(slurm: Cluster, tmp_path: Path) -> None:
    make_tokenizer(slurm.shared_root)
    described = describe(tmp_path, "story", 6, large=(1, 2, 4), max_running=6)
    damaged = tmp_path / "text/1-3.jsonl"
    was, at = damage(damaged), damaged.stat().st_mtime_ns
    profile = slurm.profile("story", cpu_partition="cpu", max_time_min=30)
    words = (described, "--profile", profile)
    sent = submit(slurm, *words)
    assert sent["missing"] == [0, 1, 2, 3, 4, 5]
    ((job, directory),) = [(one["job"], Path(one["directory"])) for one in sent["jobs"]]
    folder = slurm.shared_root / "data/story"
    assert directory == folder / "jobs/1"

    # 1 is told to end, as before a time limit; 2 goes back into the queue; 4 is cancelled: each in its second file
    for task in (1, 2, 4):
        until_there(folder / f".parts/{task:05d}/00000.json")
        slurm.call(
            *{1: ["scancel", "--batch", "--signal=TERM"], 2: ["scontrol", "requeue"], 4: ["scancel"]}[task],
            f"{job}_{task}",
        )
    states = until_ended(slurm, job)
    assert states == {0: "COMPLETED", 1: "FAILED", 2: "COMPLETED", 3: "FAILED", 4: "CANCELLED", 5: "COMPLETED"}
    seen = status(slurm, *words)
    assert [one["state"] for one in seen["shards"]] == ["whole", "failed", "whole", "failed", "cancelled", "whole"]
    assert seen["next"] == f"moekit data tokenize {described} --on slurm"
    ended, broken = seen["shards"][1], seen["shards"][3]
    assert ended["why"] == "exit code 143:0"
    assert ended["last_line"] == "ended by SIGTERM: 1 of 2 files are done and kept, the next start goes on"
    assert str(damaged) in Path(broken["log"]).read_text()
    starts = re.findall(r"^shard 2: .*, start (\d)$", (directory / f"slurm-{job}_2.log").read_text(), re.MULTILINE)
    assert starts == ["0", "1"]
    shown = slurm.moekit("data", "status", *words).stdout.splitlines()
    assert shown[0] == "story: 3 of 6 shards are whole, 2 failed, 1 cancelled"
    assert shown[-1] == f"  next        moekit data tokenize {described} --on slurm --profile {profile}"

    # the same command: what is missing, and not a second time while it waits
    damaged.write_bytes(was)
    os.utime(damaged, ns=(at, at))
    slurm.call("scontrol", "update", "PartitionName=cpu", "State=DOWN")
    again = submit(slurm, *words)
    (second,) = [one["job"] for one in again["jobs"]]
    assert again["missing"] == [1, 3, 4]
    assert "#SBATCH --array=1,3-4%6\n" in (folder / "jobs/2/array.sbatch").read_text()
    for command in (("--on", "slurm"), ("--on", "local")):
        refused = slurm.moekit("data", "tokenize", *words, *command)
        assert refused.returncode == 1
        assert f"data set `story` is being tokenized: its job {second} has not ended" in refused.stderr
    assert [one["state"] for one in status(slurm, *words)["shards"]].count("waiting") == 3
    slurm.call("scontrol", "update", "PartitionName=cpu", "State=UP")
    assert {*until_ended(slurm, second).values()} == {"COMPLETED"}

    seen = status(slurm, *words)
    assert {one["state"] for one in seen["shards"]} == {"whole"}
    assert seen["next"] == "moekit data manifest story"
    for task in (1, 2, 4):  # what was done before the end was kept
        log = (folder / f"logs/{task:05d}.log").read_text()
        assert log.count(f"0-{task}.jsonl: ") == log.count(f"1-{task}.jsonl: ") == 1, log
    assert submit(slurm, *words)["jobs"] == []

    make_tokenizer(tmp_path / "here")
    done = slurm.moekit("data", "tokenize", described, "--shared-root", tmp_path / "here")
    assert done.returncode == 0, done.stderr
    assert len(bytes_of(folder)) == 12
    assert bytes_of(folder) == bytes_of(tmp_path / "here/data/story")


def test_a_job_whose_id_was_lost_is_found_and_not_submitted_twice(slurm: Cluster, tmp_path: Path) -> None:
    """sbatch is cut off behind Slurm's taking the job, whose elements run by the time they are looked for."""
    make_tokenizer(slurm.shared_root)
    described = describe(tmp_path, "lost", 3, large=(0, 1))
    words = ("data", "tokenize", described, "--on", "slurm", "--profile", slurm.profile("lost", cpu_partition="cpu"))
    folder = tmp_path / "bin"
    folder.mkdir()
    said = "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)"
    text = f'#!/bin/bash\n{shutil.which("sbatch")} "$@" >/dev/null\necho "{said}" >&2\nexit 1\n'
    (folder / "sbatch").write_text(text)
    (folder / "sbatch").chmod(0o755)
    done = slurm.moekit(*words, PATH=f"{folder}:{os.environ['PATH']}")
    assert done.returncode == 1
    assert "it may have the job all the same: `moekit data status lost` looks for it" in done.stderr
    until_there(slurm.shared_root / "data/lost/.parts/00000/00000.json")
    jobs = slurm.call("squeue", "-h", "-t", "all", "-n", "lost-tokenize", "-o", "%F").stdout.split()
    (job,) = {*jobs}
    done = slurm.moekit(*words)
    assert done.returncode == 1
    assert f"data set `lost` is being tokenized: its job {job} has not ended" in done.stderr
    assert {*until_ended(slurm, job).values()} == {"COMPLETED"}
    assert slurm.moekit(*words).stdout.splitlines()[0] == "lost: all 3 shards are whole"


def test_more_shards_than_an_array_may_have(slurm: Cluster, tmp_path: Path) -> None:
    """The profile says three; what Slurm itself says is asked where the profile is silent."""
    make_tokenizer(slurm.shared_root)
    described = describe(tmp_path, "many", 7, max_running=2)
    profile = slurm.profile("many", cpu_partition="cpu", max_array_tasks=3)
    sent = submit(slurm, described, "--profile", profile)
    assert [one["tasks"] for one in sent["jobs"]] == [[0, 1, 2], [3, 4, 5], [6]]
    for one in sent["jobs"]:
        assert {*until_ended(slurm, one["job"]).values()} == {"COMPLETED"}
    assert {one["state"] for one in status(slurm, described, "--profile", profile)["shards"]} == {"whole"}


def test_slurms_own_limit_is_asked_for_and_is_the_one_that_sbatch_holds(slurm: Cluster, tmp_path: Path) -> None:
    from moekit.cluster.profile import find_cluster
    from moekit.data.array.submit import max_array_tasks

    most = max_array_tasks(find_cluster(str(slurm.profile("limit", cpu_partition="cpu"))))
    assert most == 1001
    for index, code in ((most - 1, 0), (most, 1)):
        done = slurm.call("sbatch", "--hold", f"--array={index}", "--output=/dev/null", "--wrap=true")
        assert done.returncode == code, done.stderr


def test_what_slurm_refuses_is_said_in_its_words_and_leaves_no_job(slurm: Cluster, tmp_path: Path) -> None:
    make_tokenizer(slurm.shared_root)
    described = describe(tmp_path, "not_taken", 2)
    for fields, said in (
        ({"cpu_partition": "nowhere"}, "sbatch refused the job: "),
        ({"cpu_partition": None}, "profile `not_taken` names no partition of CPU nodes, and tokenizing takes no GPU"),
        ({"cpu_partition": "cpu", "max_time_min": 120}, "sbatch refused the job: "),
    ):
        profile = slurm.profile("not_taken", **fields)
        done = slurm.moekit("data", "tokenize", described, "--on", "slurm", "--profile", profile)
        assert (done.returncode, done.stdout) == (1, "")
        assert said in done.stderr
        assert "Traceback" not in done.stderr
    assert slurm.call("squeue", "-h", "-t", "all", "-n", "not_taken-tokenize", "-o", "%A").stdout == ""
    profile = slurm.profile("not_taken", cpu_partition="cpu")
    (one,) = submit(slurm, described, "--profile", profile)["jobs"]
    assert {*until_ended(slurm, one["job"]).values()} == {"COMPLETED"}


def test_a_dry_run_prints_what_is_submitted_and_asks_nobody(slurm: Cluster, tmp_path: Path) -> None:
    make_tokenizer(slurm.shared_root)
    described = describe(tmp_path, "dry", 3)
    profile = slurm.profile("dry", cpu_partition="cpu")
    words = ("data", "tokenize", described, "--on", "slurm", "--profile", profile)
    dry = slurm.moekit(*words, "--dry-run", "--json", SLURM_CONF="/nowhere")
    assert dry.returncode == 0, dry.stderr
    assert not (slurm.shared_root / "data/dry").exists()
    (one,) = submit(slurm, described, "--profile", profile)["jobs"]
    written = {path.name: path.read_text() for path in Path(one["directory"]).iterdir() if path.suffix != ".log"}
    assert written == json.loads(dry.stdout)
    until_ended(slurm, one["job"])
