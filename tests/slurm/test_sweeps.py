"""Several runs in one launch, on a real Slurm: all or none is wrong, and what was cut off is finished by a rerun."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster

pytestmark = pytest.mark.slurm

SWEEP = """
base: first_moe_smoke
control: forced_balance
ladder:
  start:
  seven: {router: {topk: 7}}
  fused: {moe: {permute_fusion: true}}
"""
NAMES = ["start", "start-forced_balance", "seven", "seven-forced_balance", "fused", "fused-forced_balance"]
SBATCH = """#!/bin/bash
for word; do [[ $word == --chdir=*@NAME@ ]] && { @ACT@; }; done
exec @SBATCH@ "$@"
"""


@pytest.fixture
def profile(slurm: Cluster) -> Iterator[Path]:
    """With a trainer that only waits; jobs that are left are cancelled."""
    trainer = slurm.shared_root / "waits"
    trainer.write_text("#!/bin/bash\nexec sleep 600\n")
    trainer.chmod(0o755)
    yield slurm.profile("sweeps", python=str(trainer), cpus_per_task=2)
    slurm.call("scancel", "--user=root")


def sweep(folder: Path, name: str, text: str = SWEEP) -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(text)
    return path


def launch(slurm: Cluster, profile: Path, *words: str | Path, **env: str) -> tuple[int, dict[str, bool], str]:
    """Exit code, for each run whether it was submitted now, and standard error."""
    done = slurm.moekit("launch", *words, "--profile", profile, "--json", **env)
    said = json.loads(done.stdout) if done.stdout else []
    return done.returncode, {run["run"]: run["submitted"] for run in said}, done.stderr


def jobs_of(slurm: Cluster, prefix: str) -> list[str]:
    """The names of the jobs that Slurm has, one for each."""
    names = slurm.call("squeue", "-h", "-t", "all", "-o", "%j %T").stdout.splitlines()
    return sorted(line.split()[0] for line in names if line.startswith(f"{prefix}-") and "CANCELLED" not in line)


def instead_of_sbatch(folder: Path, name: str, act: str) -> str:
    """A PATH whose sbatch does something else for the run of a name."""
    folder.mkdir()
    program = str(shutil.which("sbatch"))
    (folder / "sbatch").write_text(SBATCH.replace("@NAME@", name).replace("@ACT@", act).replace("@SBATCH@", program))
    (folder / "sbatch").chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def test_a_sweep_is_submitted_once(slurm: Cluster, profile: Path, tmp_path: Path) -> None:
    path = sweep(tmp_path, "once")
    code, submitted, said = launch(slurm, profile, path)
    assert (code, said) == (0, "")
    assert submitted == {f"once-{name}": True for name in NAMES}
    assert jobs_of(slurm, "once") == sorted(submitted)
    provenance = json.loads((slurm.shared_root / "runs/once-fused/provenance.json").read_text())
    assert (provenance["group"], provenance["compared_with"]) == ("once", "once-seven")

    code, again, _ = launch(slurm, profile, path)
    assert (code, again) == (0, dict.fromkeys(submitted, False))
    shown = slurm.moekit("launch", path, "--profile", profile).stdout.splitlines()
    assert shown[0].startswith("once-start                 is there already: ")
    assert shown[-1] == f"  next        moekit status --profile {profile}"

    longer = (
        SWEEP
        + "  fp8: {precision: {fp8_format: e4m3, fp8_recipe: blockwise}, router: {padding_for_quantization: true}}\n"
    )
    _, more, _ = launch(slurm, profile, sweep(tmp_path, "once", longer))
    assert [name for name, new in more.items() if new] == ["once-fp8", "once-fp8-forced_balance"]
    assert len(jobs_of(slurm, "once")) == 8

    code, _, said = launch(slurm, profile, sweep(tmp_path, "once", SWEEP.replace("topk: 7", "topk: 6")))
    assert code == 1
    assert "run `once-seven` is there already, of another recipe or of this one before it was changed" in said
    assert len(jobs_of(slurm, "once")) == 8


def test_all_that_is_wrong_is_told_at_once_and_nothing_is_written(
    slurm: Cluster, profile: Path, tmp_path: Path
) -> None:
    wrong = (
        SWEEP.replace("ladder", "sweep")
        .replace("topk: 7", "topkk: 8")
        .replace("permute_fusion: true", "num_experts: 65")
    )
    code, _, said = launch(slurm, profile, sweep(tmp_path, "wrong", wrong), "no_such_recipe")
    assert code == 1
    assert said.count("unknown field `router.topkk`") == 1
    assert said.count("65 experts") == 1
    assert "there is no recipe `no_such_recipe`" in said

    lacking = sweep(tmp_path, "lacking", "base: dense\ndata: {name: no_such_data, tokenizer: no_such_tokenizer}\n")
    code, _, said = launch(slurm, profile, sweep(tmp_path, "missing"), lacking)
    assert code == 1
    assert "there is no data set `no_such_data`" in said
    assert "there is no tokenizer `no_such_tokenizer`" in said
    assert not [*(slurm.shared_root / "runs").glob("missing*")]
    assert jobs_of(slurm, "missing") == []


def test_a_refusal_in_the_middle_is_mended_by_the_same_launch(slurm: Cluster, profile: Path, tmp_path: Path) -> None:
    path = sweep(tmp_path, "refused")
    act = "echo 'sbatch: error: QOSMaxSubmitJobPerUserLimit' >&2; exit 1"
    code, submitted, said = launch(slurm, profile, path, PATH=instead_of_sbatch(tmp_path / "bin", "refused-seven", act))
    assert code == 1
    assert "sbatch refused the job: QOSMaxSubmitJobPerUserLimit" in said
    assert [name for name, new in submitted.items() if new] == ["refused-start", "refused-start-forced_balance"]
    assert jobs_of(slurm, "refused") == ["refused-start", "refused-start-forced_balance"]
    code, submitted, _ = launch(slurm, profile, path)
    assert code == 0
    assert [name for name, new in submitted.items() if not new] == ["refused-start", "refused-start-forced_balance"]
    assert jobs_of(slurm, "refused") == sorted(f"refused-{name}" for name in NAMES)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_launch_that_is_killed_is_finished_by_the_same_launch(
    when: str, slurm: Cluster, profile: Path, tmp_path: Path
) -> None:
    """Killed as sbatch is asked for the third run: `before` Slurm has its job, or `after`."""
    name = f"killed_{when}"
    path = sweep(tmp_path, name)
    asked = tmp_path / "asked"
    act = {
        "before": f"touch {asked}; sleep 60; exit 1",
        "after": f'{shutil.which("sbatch")} "$@"; touch {asked}; sleep 60; exit 1',
    }[when]
    command = [sys.executable, "-m", "moekit", "launch", str(path), "--profile", str(profile)]
    environment = slurm.env(PATH=instead_of_sbatch(tmp_path / "bin", f"{name}-seven", act))
    process = subprocess.Popen(command, env=environment, start_new_session=True, stdout=subprocess.DEVNULL)
    while not asked.exists():
        assert process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    code, submitted, said = launch(slurm, profile, path)
    assert code == 0, said
    assert jobs_of(slurm, name) == sorted(f"{name}-{one}" for one in NAMES)
    assert submitted[f"{name}-seven"] is (when == "before")


def test_killed_at_any_moment_each_run_has_one_job_and_all_one_index(
    slurm: Cluster, profile: Path, tmp_path: Path
) -> None:
    """By the same launch again; the runs share their data, whose index is built first."""
    shared = tmp_path / "shared"
    (shared / "data/some").mkdir(parents=True)
    (shared / "data/some/data-args.txt").touch()
    waits = str(slurm.shared_root / "waits")
    here = slurm.profile("killed", python=waits, cpus_per_task=2, cpu_partition="cpu", shared_root=str(shared))
    text = "base: first_moe\ndata: {name: some, tokenizer: null, tokenizer_type: NullTokenizer, vocab_size: 128256}\n"
    text += "sweep:\n" + "".join(f"  v{i}: {{train: {{exit_interval: {i + 8}}}}}\n" for i in range(4))
    moments = random.Random(6)
    for number in range(10):
        name = f"k{number}"
        command = [sys.executable, "-m", "moekit", "launch", str(sweep(tmp_path, name, text)), "--profile", str(here)]
        process = subprocess.Popen(command, env=slurm.env(), start_new_session=True, stdout=subprocess.DEVNULL)
        time.sleep(moments.uniform(0.2, 1.2))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        code, submitted, said = launch(slurm, here, tmp_path / f"{name}.yaml")
        assert code == 0, said
        assert len(submitted) == 4
        assert jobs_of(slurm, name) == sorted([*submitted, f"{name}-v0-index"])
        slurm.call("scancel", "--user=root")
