"""The texts of the array that tokenizes a data set, what Slurm says of it, and the words of `moekit data status`.

What the real Slurm makes of them: tests/slurm/test_data_array.py.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from moekit.cluster.profile import Cluster
from moekit.data.array import status as array_status
from moekit.data.array.jobs import Submitted, still_there
from moekit.data.array.submit import submit
from moekit.data.array.texts import Array, array_files, arrays, index_list, read_array
from moekit.data.dataset import Dataset
from moekit.data.plan import DataFolder, Plan, ShardRecord
from moekit.launch.rundir import RunDir
from moekit.launch.slurm_text import Job
from moekit.problems import MoekitError
from moekit.runs import submissions

CLUSTER = Cluster(
    name="x",
    gpus_per_node=8,
    gpu="h100",
    fabric="efa",
    container="none",
    shared_root="/fsx/moekit",
    cpu_partition="cpu",
)
DATASET = Dataset(
    name="some",
    source=("/text/*.parquet",),
    tokenizer="t",
    end_of_document="<end>",
    tasks=100,
    cpus_per_task=12,
    memory_gib=24,
)
FOLDER = DataFolder(Path("/fsx/moekit/data/some"))
HOSTILE = '/fsx/it\'s $(touch x); `y` "z" \\'


def script(dataset: Dataset = DATASET, cluster: Cluster = CLUSTER) -> str:
    return array_files(dataset, FOLDER, Array(0, (0, 1, 2, 3, 7)), cluster, "/venv/bin/python")["array.sbatch"]


def test_an_element_asks_for_what_the_description_says() -> None:
    assert script().splitlines()[2:] == [
        "#SBATCH --job-name=some-tokenize",
        "#SBATCH --array=0-3,7",
        "#SBATCH --partition=cpu",
        "#SBATCH --nodes=1",
        "#SBATCH --ntasks=1",
        "#SBATCH --cpus-per-task=12",
        "#SBATCH --mem=24G",
        "#SBATCH --output=slurm-%A_%a.log",
        "#SBATCH --open-mode=append",
        "#SBATCH --requeue",
        "exec bash tokenize.sh 0",
    ]
    files = array_files(DATASET, FOLDER, Array(0, (0,)), CLUSTER, "/venv/bin/python")
    words = ["/venv/bin/python", "-m", "moekit.data.array.task", "/fsx/moekit/data/some", "12"]
    assert files["argv.python"].splitlines() == words


def test_what_is_set_is_said_and_nothing_else() -> None:
    cluster = replace(CLUSTER, account="a", qos="q", max_time_min=600)
    lines = script(replace(DATASET, max_running=20), cluster).splitlines()
    assert {"#SBATCH --account=a", "#SBATCH --qos=q", "#SBATCH --time=600", "#SBATCH --array=0-3,7%20"} <= set(lines)
    assert "#SBATCH --time=90" in script(replace(DATASET, time_limit_min=90), cluster).splitlines()


def test_what_the_profile_does_not_give_is_refused() -> None:
    with pytest.raises(MoekitError) as refused:
        script(replace(DATASET, time_limit_min=601), replace(CLUSTER, cpu_partition=None, max_time_min=600))
    partition, limit = refused.value.problems
    assert partition.what == "profile `x` names no partition of CPU nodes, and tokenizing takes no GPU"
    assert partition.hint == "name one in its `cpu_partition`, or tokenize here with `--on local`"
    assert limit.what == "`time_limit_min` of data set `some`: 601 minutes are more than the 600 of profile `x`"


@pytest.mark.parametrize(
    ("numbers", "text"), [([5], "5"), ([0, 1, 2], "0-2"), ([0, 2, 3, 9], "0,2-3,9"), ([0, 1, 3, 4], "0-1,3-4")]
)
def test_the_list_of_elements(numbers: list[int], text: str) -> None:
    assert index_list(numbers) == text


def test_every_shard_is_in_one_array_and_no_index_is_above_the_sites_limit() -> None:
    choose = random.Random(8)
    for _ in range(300):
        missing = sorted(choose.sample(range(3000), choose.randrange(1, 400)))
        most = choose.randrange(1, 1500)
        made = arrays(missing, most)
        assert [task for array in made for task in array.tasks] == missing
        for array in made:
            indices: list[int] = []
            for part in array.indices.split(","):
                first, _, last = part.partition("-")
                indices += range(int(first), int(last or first) + 1)
            assert [array.offset + index for index in indices] == list(array.tasks)
            assert max(indices) < most


def test_a_directory_says_what_its_elements_make(tmp_path: Path) -> None:
    array = Array(1001, (1003, 1005))
    (tmp_path / "array.json").write_text(array_files(DATASET, FOLDER, array, CLUSTER, "p")["array.json"])
    assert read_array(tmp_path) == array
    assert array.log(tmp_path, "17;there", 1003) == tmp_path / "slurm-17_2.log"
    (tmp_path / "array.json").write_text('{"offset": 3')
    assert read_array(tmp_path) is None


def run_body(folder: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "tokenize.sh", *words], cwd=folder, capture_output=True, text=True, env=env)


def test_the_body_runs_the_command_with_the_shards_number_and_no_shell_reads_it(tmp_path: Path) -> None:
    assert shutil.which("shellcheck"), "shellcheck is not installed"
    python = tmp_path / "it's; $(exit 3)"
    python.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\nexit 7\n')
    python.chmod(0o755)
    files = array_files(DATASET, DataFolder(Path(HOSTILE)), Array(1001, (1003,)), CLUSTER, str(python))
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    for name in ("array.sbatch", "tokenize.sh"):
        found = subprocess.run(["shellcheck", "-s", "bash", name], cwd=tmp_path, capture_output=True, text=True)
        assert found.stdout == ""
    done = run_body(tmp_path, "1001", SLURM_ARRAY_TASK_ID="2", SLURM_ARRAY_JOB_ID="17", PATH="/usr/bin:/bin")
    assert done.returncode == 7
    heading, *said = done.stdout.splitlines()
    assert heading.startswith("shard 1003: job 17_2 on ")
    assert said == ["-m", "moekit.data.array.task", HOSTILE, "12", "1003"]

    python.unlink()
    done = run_body(tmp_path, "0", SLURM_ARRAY_TASK_ID="2", PATH="/usr/bin:/bin")
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith(": submit with a moekit that lies where all nodes see it")
    done = run_body(tmp_path, "0", PATH="/usr/bin:/bin")
    assert done.stderr == f"tokenize.sh: this is no element of an array: run `sbatch array.sbatch` in {tmp_path}\n"


def test_a_folder_with_a_newline_is_refused() -> None:
    with pytest.raises(MoekitError, match="has a newline in its value"):
        array_files(DATASET, DataFolder(Path("/a\nb")), Array(0, (0,)), CLUSTER, "p")


# What Slurm says

Clients = Callable[[Mapping[str, str]], None]


@pytest.fixture
def clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Clients:
    """Put shell scripts on PATH in the place of Slurm's commands; each call adds a line to `calls`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    def put(bodies: Mapping[str, str]) -> None:
        for name, body in bodies.items():
            (folder / name).write_text(f'#!/bin/bash\necho "{name} $*" >>{tmp_path}/calls\n{body}\n')
            (folder / name).chmod(0o755)

    put({"squeue": "exit 0", "sacct": "exit 0", "scontrol": "exit 0", "sbatch": "echo 17"})
    return put


def squeue_line(element: str, state: str, folder: str = "/f") -> str:
    return "|".join([element, state, "None", "0", "N/A", "N/A", "1", "n1", "N/A", "some-tokenize", folder, ""])


def sent(tmp_path: Path, missing: list[int], dataset: Dataset = DATASET, cluster: Cluster = CLUSTER) -> list[str]:
    (tmp_path / "some").mkdir(exist_ok=True)
    jobs, problems = submit(dataset, DataFolder(tmp_path / "some"), missing, cluster, "p")
    assert problems == []
    return [one.job for one in jobs]


def test_a_submission_is_put_down_and_the_next_is_refused_while_it_is_there(clients: Clients, tmp_path: Path) -> None:
    assert sent(tmp_path, [0, 1, 2]) == ["17"]
    run = tmp_path / "some"
    assert read_array(run / "jobs/1") == Array(0, (0, 1, 2))
    assert json.loads((run / "submissions/1.json").read_text())["job"] == "17"

    clients({"squeue": f"printf '%s\\n' '{squeue_line('17_0', 'COMPLETED')}' '{squeue_line('17_1', 'PENDING')}'"})
    with pytest.raises(MoekitError) as refused:
        sent(tmp_path, [2])
    (problem,) = refused.value.problems
    assert problem.what == "data set `some` is being tokenized: its job 17 has not ended"
    assert problem.hint == "wait for it, or `scancel 17`; `moekit data status some` says more"

    # also where its directory is gone
    shutil.rmtree(run / "jobs")
    with pytest.raises(MoekitError, match="its job 17 has not ended"):
        sent(tmp_path, [2])

    clients({"squeue": f"printf '%s\\n' '{squeue_line('17_0', 'COMPLETED')}' '{squeue_line('17_1', 'FAILED')}'"})
    assert sent(tmp_path, [1, 2]) == ["17"]
    assert read_array(run / "jobs/2") == Array(0, (1, 2))


def test_more_shards_than_an_array_may_have_make_several(clients: Clients, tmp_path: Path) -> None:
    clients({"scontrol": "echo 'MaxArraySize            = 10'"})
    assert sent(tmp_path, [0, 9, 10, 25]) == ["17", "17", "17"]
    (tmp_path / "calls").unlink()
    shutil.rmtree(tmp_path / "some")
    sent(tmp_path, [0, 9, 10], replace(DATASET, max_running=3))
    asked = [line for line in (tmp_path / "calls").read_text().splitlines() if line.startswith("sbatch")]
    assert ["--dependency=afterany:17" in line for line in asked] == [False, True]
    shutil.rmtree(tmp_path / "some")
    assert len(sent(tmp_path, [0, 9, 10, 25], cluster=replace(CLUSTER, max_array_tasks=20))) == 2


def test_a_refusal_is_told_in_slurms_words(clients: Clients, tmp_path: Path) -> None:
    said = "sbatch: error: Batch job submission failed: Invalid partition name specified"
    clients({"sbatch": f"echo '{said}' >&2; exit 1"})
    with pytest.raises(MoekitError) as refused:
        sent(tmp_path, [0])
    (problem,) = refused.value.problems
    assert problem.what == "sbatch refused the job: Invalid partition name specified"
    path = tmp_path / "some/jobs/1/array.sbatch"
    assert problem.hint == f"what it asks for is in {path}, from the profile and the data set's description"
    clients({"sbatch": "echo 18"})
    assert sent(tmp_path, [0]) == ["18"]


def test_the_second_of_two_arrays_refused_leaves_the_first(clients: Clients, tmp_path: Path) -> None:
    once = tmp_path / "once"
    refuse = "echo 'sbatch: error: QOSMaxSubmit' >&2; exit 1"
    clients({"sbatch": f"[[ -e {once} ]] && {{ {refuse}; }}; touch {once}; echo 5"})
    (tmp_path / "some").mkdir()
    jobs, (problem,) = submit(DATASET, DataFolder(tmp_path / "some"), [0, 5], replace(CLUSTER, max_array_tasks=3), "p")
    assert [one.job for one in jobs] == ["5"]
    assert problem.what == "sbatch refused the job: QOSMaxSubmit"


def test_a_job_whose_id_was_lost_is_found_by_its_directory(clients: Clients, tmp_path: Path) -> None:
    clients({"sbatch": "echo 'sbatch: error: Unable to contact slurm controller' >&2; exit 1"})
    with pytest.raises(MoekitError, match="it may have the job all the same: `moekit data status some` looks for it"):
        sent(tmp_path, [0, 1])
    folder = str(tmp_path / "some/jobs/1")
    lines = {
        "--me": squeue_line("21", "PENDING", folder),
        "ArrayJobID": "20|",
        "--array": squeue_line("20_0", "PENDING"),
    }
    cases = "".join(f"*{word}*) echo '{line}' ;; " for word, line in lines.items())
    clients({"squeue": f'case "$*" in {cases} esac', "sbatch": "echo 22"})
    with pytest.raises(MoekitError, match="its job 20 has not ended"):
        sent(tmp_path, [0, 1])
    assert json.loads((tmp_path / "some/submissions/1.json").read_text())["job"] == "20"


def test_two_at_once_submit_once(clients: Clients, tmp_path: Path) -> None:
    run = tmp_path / "some"
    run.mkdir()
    submissions.claim(RunDir(run), 0)  # by this process, which is there
    with pytest.raises(MoekitError, match="`some` is being submitted by another moekit"):
        sent(tmp_path, [0])
    assert not (tmp_path / "calls").exists()


def test_slurm_that_does_not_answer_lets_nothing_be_submitted(clients: Clients, tmp_path: Path) -> None:
    assert sent(tmp_path, [0]) == ["17"]
    clients({"squeue": "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1"})
    with pytest.raises(MoekitError, match="squeue has no answer from Slurm"):
        sent(tmp_path, [0])


# Status

PLAN = Plan(
    *("some", "jsonl", "text", "id", (), "t", "0" * 64, 1000, "<end>", 999, None),
    tasks=6,
    max_document_mib=4,
    limit=None,
    versions={},
)


def test_each_shards_state(tmp_path: Path) -> None:
    folder = DataFolder(tmp_path / "some")
    (folder.path / "shards").mkdir(parents=True)
    prefix = folder.prefix("some", 0)
    prefix.with_name(prefix.name + ".bin").write_bytes(b"1234")
    prefix.with_name(prefix.name + ".idx").write_bytes(b"123")
    record = ShardRecord(0, 1, 2, 1, 0, 0, bin_bytes=4, idx_bytes=3, bin_sha256="", idx_sha256="", seconds=1.0)
    folder.record(0).write_text(json.dumps(asdict(record)))
    newest, before = tmp_path / "jobs/2", tmp_path / "jobs/1"
    newest.mkdir(parents=True)
    (newest / "slurm-9_2.log").write_text("first\nit \x1b[31m failed\n\n")
    waits = Job("9_1", "PENDING", reason="Resources")
    failed = Job("9_2", "FAILED", exit_code="1:0", nodes="n1")
    arrays = [
        Submitted(newest, "9", Array(0, (1, 2)), {1: waits, 2: failed}, True),
        Submitted(
            before,
            "8",
            Array(0, (0, 1, 2, 3)),
            {0: Job("8_0", "COMPLETED"), 3: Job("8_3", "RUNNING", nodes="n2")},
            True,
        ),
        Submitted(tmp_path / "jobs/0", "7", Array(0, (4,)), {}, False),
    ]
    found = array_status.shards(folder, PLAN, arrays)
    assert array_status.table(found) == [
        "SHARD  STATE    JOB  WHY            LAST LINE",
        "1      waiting  9_1  Resources",
        "2      failed   9_2  exit code 1:0  it ?[31m failed",
        "3      running  8_3  n2",
        "4      unknown  7_4",
        "5      missing",
    ]
    counted = "1 of 6 shards are whole, 1 waiting, 1 failed, 1 running, 1 unknown, 1 missing"
    assert array_status.counted(found) == counted
    assert found[2].as_json() == {
        "task": 2,
        "state": "failed",
        "job": "9_2",
        "why": "exit code 1:0",
        "log": str(newest / "slurm-9_2.log"),
        "last_line": "it ?[31m failed",
    }
    # a file that was cut off afterwards: the shard is not whole, whatever Slurm said of its element
    prefix.with_name(prefix.name + ".bin").write_bytes(b"123")
    assert array_status.shards(folder, PLAN, arrays)[0].word == "damaged"


def test_nothing_is_in_the_way_once_all_has_ended() -> None:
    assert still_there([Submitted(Path(), "7", Array(0, (4,)), {4: Job("7_4", "FAILED")}, False)], "some") is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--dry-run"], "`--dry-run` shows what would be submitted"),
        (["--on", "slurm", "--limit", "5"], "`--limit` makes a sample, which takes no Slurm"),
        (["--on", "slurm", "--workers", "5"], "`--workers 5` is for this machine"),
        (["--on", "slurm"], "profile `aws-p5` names no partition of CPU nodes"),
    ],
)
def test_options_that_do_not_go_together(words: list[str], said: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "moekit", "data", "tokenize", "fineweb_edu", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert said in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_status_of_what_was_never_tokenized(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "moekit", "data", "status", "fineweb_edu"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert "nothing was tokenized here\n    hint: `moekit data tokenize fineweb_edu` does it\n" in done.stderr
