"""`moekit launch RECIPE --dry-run`, as a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import moekit.job
from moekit.launch.run_files import job_files

JOB = Path(moekit.job.__file__).parent
MAIN = [sys.executable, "-m", "moekit", "launch"]


def launch(cwd: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run it where no Slurm, no compiler and no home is."""
    given = {"PATH": "/nowhere", "PYTHONPATH": str(Path(__file__).parents[2]), **env}
    return subprocess.run([*MAIN, *words], cwd=cwd, env=given, capture_output=True, text=True)


def test_the_same_bytes_every_time(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    one = launch(tmp_path, "first_moe", "--dry-run")
    other = launch(tmp_path / "elsewhere", "--dry-run", "first_moe", PYTHONHASHSEED="7", LC_ALL="C", TZ="Asia/Tokyo")
    assert one.returncode == 0
    assert one.stdout == other.stdout
    assert [path for path in tmp_path.iterdir() if path.name != "elsewhere"] == []
    preflight = [*(JOB / "preflight").glob("*.py")]
    more = f"with {len(job_files()) + len(preflight)} more files in job/"
    assert one.stderr == f"nothing written; the run would lie in /fsx/moekit/runs/first_moe, {more}\n"


def test_printed_sections_are_the_written_files(tmp_path: Path) -> None:
    printed = launch(tmp_path, "first_moe", "--dry-run").stdout
    done = launch(tmp_path, "first_moe", "--dry-run=out")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.endswith(
        " files in out; in it, `sbatch job.sbatch` starts the job, where nodes see it: below /fsx/moekit\n"
    )
    files = sorted(path for path in (tmp_path / "out").rglob("*") if path.is_file())
    top = {path.name: path.read_text() for path in files if path.parent.name == "out"}
    sections = printed.split("==> ")[1:]
    assert {part.partition(" <==\n")[0]: part.partition(" <==\n")[2].rstrip("\n") for part in sections} == {
        name: text.rstrip("\n") for name, text in top.items()
    }
    assert (tmp_path / "out" / "job" / "entry.py").is_file()
    as_json = json.loads(launch(tmp_path, "first_moe", "--dry-run", "--json").stdout)
    assert as_json == {path.relative_to(tmp_path / "out").as_posix(): path.read_text() for path in files}


def test_a_folder_is_written_once(tmp_path: Path) -> None:
    assert launch(tmp_path, "dense", "--dry-run=out").returncode == 0
    again = launch(tmp_path, "dense", "--dry-run=out")
    assert again.returncode == 1
    assert again.stderr == (
        "error: `out` already exists\n    hint: `--dry-run=DIR` takes a folder that is not there yet\n"
    )


def test_the_name_is_the_recipes_or_given(tmp_path: Path) -> None:
    assert "#SBATCH --job-name=dense\n" in launch(tmp_path, "dense", "--dry-run").stdout
    named = launch(tmp_path, "dense", "--dry-run", "--name", "trial-2").stdout
    assert "#SBATCH --job-name=trial-2\n" in named
    assert "--wandb-exp-name\ntrial-2\n" in named


def test_a_hostile_name_is_refused(tmp_path: Path) -> None:
    done = launch(tmp_path, "dense", "--dry-run", "--name", "x; touch p")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "error: a run cannot be named `x; touch p`\n"
        "    hint: up to 100 letters, digits, `.`, `_`, `-`, at first a letter, digit or `_`: give `--name`\n"
    )


def test_a_recipe_with_problems_prints_nothing(tmp_path: Path) -> None:
    (tmp_path / "broken.yaml").write_text("base: first_moe\nrouter:\n  topk: 65\nmoe:\n  num_expert: 3\n")
    done = launch(tmp_path, "broken.yaml", "--dry-run=out")
    assert (done.returncode, done.stdout) == (1, "")
    assert "broken.yaml:5: unknown field `moe.num_expert`" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_run_on_this_machine_has_no_job(tmp_path: Path) -> None:
    done = launch(tmp_path, "quickstart", "--dry-run", "--json")
    assert done.returncode == 0
    files = json.loads(done.stdout)
    assert {name for name in files if not name.startswith("job/")} == {
        "recipe.yaml",
        "argv.first",
        "argv.resume",
        "end",
        "provenance.json",
    }
    assert f"{tmp_path}/moekit-local/data/python-docs/data-args.txt" in files["argv.first"].splitlines()
    job = launch(tmp_path, "quickstart", "--dry-run", "--on", "slurm")
    assert job.returncode == 0
    assert "==> job.sbatch <==" in job.stdout  # on nodes of a cluster, where that is said


def test_a_cluster_is_never_guessed(tmp_path: Path) -> None:
    done = launch(tmp_path, "dense")
    assert done.returncode == 1
    assert done.stderr == (
        "error: no `--profile` says on which cluster to train\n"
        "    hint: `moekit launch dense --profile FILE` submits it, `--on local` trains here, "
        "`--dry-run` shows the job; `moekit init` writes a profile\n"
    )


@pytest.mark.parametrize("where", [[], ["--on", "local"]])
def test_nothing_heavy_is_imported(tmp_path: Path, where: list[str]) -> None:
    script = (
        "import sys, moekit.cli\n"
        f"sys.argv = ['moekit', 'launch', 'first_moe', '--dry-run', *{where}]\n"
        "try:\n    moekit.cli.main()\n"
        "except SystemExit:\n    pass\n"
        "heavy = {'torch', 'megatron', 'numpy', 'pydantic', 'trackio', 'datatrove', 'transformers', 'requests'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == "[]"
