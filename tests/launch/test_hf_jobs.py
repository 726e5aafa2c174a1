"""`moekit launch --on hf-jobs`, by huggingface_hub's real client before a Hub on this machine."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from jobs_hub import COMMIT, TOKEN, Hub, hub_server

from moekit.launch import hf_jobs
from moekit.launch.hf_jobs_launch import Wishes, requested
from moekit.problems import MoekitError
from moekit.recipe.load import Loaded, load

ROOT = Path(__file__).parents[2]
MOEKIT = [sys.executable, "-m", "moekit"]


@pytest.fixture
def hub() -> Iterator[Hub]:
    with hub_server() as made:
        yield made


@pytest.fixture
def env(hub: Hub, tmp_path: Path) -> dict[str, str]:
    return {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(ROOT),
        "HOME": str(tmp_path),
        "HF_HOME": str(tmp_path / "hf"),
        "HF_ENDPOINT": hub.url,
        "HF_TOKEN": TOKEN,
    }


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def moekit(env: dict[str, str], tmp_path: Path) -> Run:
    def run(*words: str, stdin: str | None = None, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*MOEKIT, *words],
            cwd=tmp_path,
            env={**env, **more},
            capture_output=True,
            text=True,
            input=stdin or "",
            timeout=100,
        )

    return run


JOB = ("--on", "hf-jobs", "--flavor", "h200x8")


def test_a_run_is_one_job(hub: Hub, moekit: Run, tmp_path: Path) -> None:
    hub.log = ("iteration 1/ 20", "iteration 20/ 20")
    (tmp_path / "mine.yaml").write_text("base: first_moe\nruntime: {secrets: [MY_KEY], time_limit_min: 90}\n")
    brought = hf_jobs.brought(load(str(tmp_path / "mine.yaml")).recipe)
    hub.stored |= {f"{path}/file" for path in brought}
    hub.buckets["ada/moekit"] = {}
    done = moekit("launch", "mine.yaml", *JOB, "--yes", MY_KEY="very secret")
    assert done.returncode == 0, done.stderr
    assert "iteration 20/ 20\n" in done.stdout
    for said in (
        "machine     h200x8: 8 H200 of 141 GB, 184 vCPU, 2048 GB of memory, 24 TB of disk",
        "price       $40.00 an hour",
        "timeout     90 min, so $60.00 at most",
        "secrets     MY_KEY, from this shell",
    ):
        assert said in done.stderr
    assert done.stderr.endswith("mine: job 000000000000000000000001 is completed\n")
    (body,) = hub.posted
    assert body["secrets"] == {"MY_KEY": "very secret"}
    assert body["timeoutSeconds"] == 90 * 60
    assert body["command"] == ["bash", "/moekit-run/hf_job.sh", "mine", "/moekit", "/bucket"]
    assert body["volumes"][0]["revision"] == COMMIT
    assert hub.repositories == {"ada/moekit-runs": True}
    assert hub.buckets["ada/moekit"] == {"visibility": "private"}

    # what the dry run prints is what was sent, but for the secret and the commit
    dry = moekit("launch", "mine.yaml", *JOB, "--dry-run", "--json", "--namespace", "ada", HF_TOKEN="", HF_ENDPOINT="")
    assert dry.returncode == 0, dry.stderr
    shown = json.loads(dry.stdout)
    assert shown["request"]["secrets"] == {"MY_KEY": hf_jobs.UNSEEN}
    shown["request"]["secrets"] = body["secrets"]
    shown["request"]["volumes"][0]["revision"] = COMMIT
    assert shown["request"] == body
    assert hub.files == {f"ada/moekit-runs/mine/{name}": text for name, text in shown["files"].items()}
    assert (tmp_path / "moekit-local/runs/mine/argv.first").read_text() == shown["files"]["argv.first"]
    assert hub.files["ada/moekit-runs/mine/bring.list"].split() == brought
    for path in (tmp_path / "moekit-local").rglob("*"):
        assert not path.is_file() or "very secret" not in path.read_text()
    assert "very secret" not in done.stdout + done.stderr + dry.stdout


def test_status_logs_and_cancel_ask_the_hub(hub: Hub, moekit: Run) -> None:
    hub.slow, hub.log = True, tuple(f"line {number}" for number in range(5))
    done = moekit("launch", "first_moe_smoke", *JOB, "--yes", "--detach")
    assert done.returncode == 0, done.stderr
    assert "next        moekit logs -f first_moe_smoke" in done.stdout
    status = moekit("status", "first_moe_smoke")
    assert status.returncode == 0, status.stderr
    assert status.stdout.startswith("first_moe_smoke: job 000000000000000000000001 is running\n")
    assert "hf://buckets/ada/moekit/runs/first_moe_smoke" in status.stdout
    listed = moekit("list")
    assert listed.stdout.splitlines()[1].split()[:3] == ["first_moe_smoke", "submitted", "hf-jobs"]
    assert json.loads(moekit("list", "--json").stdout)[0]["on"] == "hf-jobs"
    again = moekit("launch", "first_moe_smoke", *JOB, "--yes", "--detach")
    assert "run `first_moe_smoke` has a Job already" in again.stderr
    here = moekit("launch", "first_moe_smoke", "--on", "local")
    assert here.returncode == 1
    assert "run `first_moe_smoke` is a Job of the Hub" in moekit("resume", "first_moe_smoke").stderr
    hub.slow = False
    logs = moekit("logs", "-f", "first_moe_smoke")
    assert [line for line in logs.stdout.splitlines() if line] == [f"line {number}" for number in range(5)]
    assert logs.stderr == "job 000000000000000000000001 is completed\n"
    late = moekit("cancel", "first_moe_smoke")
    assert "has no Job to cancel" in late.stderr
    hub.slow = True
    assert moekit("launch", "first_moe_smoke", *JOB, "--yes", "--detach").returncode == 0
    gone = moekit("cancel", "first_moe_smoke")
    assert "job 000000000000000000000002 cancelled" in gone.stdout
    assert json.loads(moekit("status", "first_moe_smoke", "--json").stdout)["state"] == "canceled"


def test_ctrl_c_ends_the_job(hub: Hub, env: dict[str, str], tmp_path: Path) -> None:
    hub.slow, hub.log = True, ("iteration 1",)
    words = [*MOEKIT, "launch", "first_moe_smoke", *JOB, "--yes"]
    with subprocess.Popen(
        words, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line == "iteration 1\n":
                break
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "is cancelled; the same command goes on from the last checkpoint in the bucket" in said
    assert next(iter(hub.jobs.values()))["status"]["stage"] == "CANCELED"


@pytest.mark.parametrize(("log", "code", "said"), [(("8",), 0, "all 8 GPUs are seen"), (("7",), 1, "sees 7 of the 8")])
def test_the_probe_counts_devices(hub: Hub, moekit: Run, log: tuple[str, ...], code: int, said: str) -> None:
    hub.log = log
    done = moekit("launch", "--probe", "--flavor", "h200x8", "--yes")
    assert (done.returncode, said in done.stdout + done.stderr) == (code, True), done.stderr
    (body,) = hub.posted
    assert body == {
        "command": ["python", "-c", "import torch; print(torch.cuda.device_count())"],
        "arguments": [],
        "environment": {},
        "flavor": "h200x8",
        "timeoutSeconds": 600,
        "labels": {"name": "moekit-probe"},
        "dockerImage": "pytorch/pytorch:2.6.0-cuda12.4-cudnn9-devel",
    }
    assert "timeout     10 min, so $6.67 at most" in done.stderr


def test_a_job_that_fails(hub: Hub, moekit: Run) -> None:
    hub.stage, hub.message = "ERROR", "Job timeout"
    done = moekit("launch", "first_moe_smoke", *JOB, "--yes")
    assert done.returncode == 1
    assert done.stderr.endswith("first_moe_smoke: job 000000000000000000000001 is error: Job timeout\n")


def test_nothing_is_sent_without_a_yes(hub: Hub, moekit: Run) -> None:
    done = moekit("launch", "first_moe_smoke", *JOB)
    assert done.returncode == 1
    assert "price       $40.00 an hour" in done.stderr
    assert "nobody is here to say yes to that price" in done.stderr
    assert not [asked for asked in hub.asked if asked.startswith("POST")]


def test_what_the_bucket_lacks_is_told_first(hub: Hub, moekit: Run) -> None:
    done = moekit("launch", "first_moe", *JOB, "--yes")
    assert done.returncode == 1
    assert (
        "hint: `hf buckets sync SHARED_ROOT/data/fineweb-edu hf://buckets/ada/moekit/data/fineweb-edu`" in done.stderr
    )
    assert hub.posted == []


@pytest.mark.parametrize(
    ("refuse", "said"),
    [
        ((402, "Insufficient balance"), "the Hub wants to be paid first: "),
        ((403, "Token lacks job.write"), "your token may not do that: "),
        ((500, "Internal"), "the Hub answers with status 500"),
    ],
)
def test_refusals(hub: Hub, moekit: Run, refuse: tuple[int, str], said: str) -> None:
    hub.refuse = refuse
    done = moekit("launch", "first_moe_smoke", *JOB, "--yes")
    assert done.returncode == 1
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert TOKEN not in done.stderr


def test_tokens(hub: Hub, moekit: Run) -> None:
    assert "the Hub does not take your token" in moekit("launch", "first_moe_smoke", *JOB, HF_TOKEN="hf_other").stderr
    assert "you are not logged in at the Hub" in moekit("launch", "first_moe_smoke", *JOB, HF_TOKEN="").stderr
    gone = moekit("launch", "first_moe_smoke", *JOB, HF_ENDPOINT="http://127.0.0.1:9")
    assert "the Hub gives no answer" in gone.stderr


def ask(loaded: Loaded, flavor: str = "h200x8", **more: object) -> hf_jobs.Request:
    return requested(loaded, Wishes(flavor, **more), "ada")  # type: ignore[arg-type]


def test_several_machines_are_refused_with_the_reason(recipe_of: Callable[..., Loaded]) -> None:
    with pytest.raises(MoekitError) as refused:
        ask(recipe_of("parallel: {gpus: 16}\n"))
    assert "16 GPUs are more than the 8 of one machine, and a Job is one machine" in str(refused.value)
    assert "the exchange of tokens would go over sockets" in str(refused.value)
    with pytest.raises(MoekitError, match="the others would be paid for"):
        ask(recipe_of("parallel: {gpus: 4, expert_model: 4}\n"))


def test_a_timeout_is_never_the_hubs(recipe_of: Callable[..., Loaded]) -> None:
    without = recipe_of("runtime: {time_limit_min: null}\n")
    with pytest.raises(MoekitError, match="the Hub stops it after 30 minutes"):
        ask(without)
    assert ask(without, timeout_min=45).timeout_s == 45 * 60
    assert ask(load("first_moe")).timeout_s == 120 * 60
    assert ask(load("first_moe"), timeout_min=300).timeout_s == 300 * 60


@pytest.mark.parametrize(
    ("flavor", "gpus", "gpu"),
    [("h200x8", 8, "h200"), ("h200", 1, "h200"), ("a100x4", 4, "a100"), ("a100-large", 1, "a100")],
)
def test_flavours(flavor: str, gpus: int, gpu: str) -> None:
    found = hf_jobs.cluster_of(flavor, hf_jobs.IMAGE)
    assert (found.gpus_per_node, found.gpu, found.fabric) == (gpus, gpu, "none")


@pytest.mark.parametrize("flavor", ["t4-small", "l40sx8", "h200x", "x; touch p", "cpu-basic", ""])
def test_no_flavours(flavor: str) -> None:
    with pytest.raises(MoekitError, match="is no machine of"):
        hf_jobs.cluster_of(flavor, hf_jobs.IMAGE)


def test_images_of_spaces() -> None:
    assert hf_jobs.probe("h200x8", "hf.co/spaces/ada/moe").body()["spaceId"] == "ada/moe"


def test_values_reach_no_shell(recipe_of: Callable[..., Loaded]) -> None:
    hostile = "it's\"$(touch${IFS}p)`p`;é"
    loaded = recipe_of(f"runtime: {{environment: {{A_NAME: {json.dumps(hostile)}}}}}\n")
    request = ask(loaded)
    assert "touch" not in json.dumps(request.body())
    files = hf_jobs.job_files(loaded, "changed", hf_jobs.cluster_of("h200x8", hf_jobs.IMAGE))
    script = f'{files["environment.sh"]}\nprintf %s "$A_NAME"'
    assert subprocess.run(["bash", "-c", script], capture_output=True, text=True).stdout == hostile
