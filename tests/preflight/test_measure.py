"""How nccl-tests are run, with an srun that does as it is told."""

from pathlib import Path

import pytest
from gpu_double import perf_text

from moekit.job.preflight import measure
from moekit.job.preflight.exchange import _identity
from moekit.job.preflight.measure import Asked, Measurer

PROFILE = {"nccl_tests": "/opt/alltoall_perf", "gpus_per_node": 8, "srun": ["--mpi=pmix"], "library_path": "/a:/b"}


@pytest.fixture
def srun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program named srun on PATH; what it does is written by the test."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "bin" / "srun"


def does(srun: Path, script: str) -> None:
    srun.write_text(f"#!/bin/bash\n{script}\n")
    srun.chmod(0o755)


def test_what_is_run_and_where_it_is_kept(srun: Path, tmp_path: Path) -> None:
    (tmp_path / "said").write_text(perf_text("alltoall_perf", ["n1", "n2"], 77.14))
    does(srun, 'echo "$@" >argv; env >environ; cat said')
    ((measured, log),) = Measurer(tmp_path / "logs", PROFILE).measure([Asked("alltoall", ("n1", "n2"), {"A": "x y"})])
    assert (measured.busbw_gb_s, measured.problem) == (77.14, "")
    assert log.name == "001.alltoall.n1-n2.log"
    assert (tmp_path / "argv").read_text() == (
        "--nodes=2 --nodelist=n1,n2 --ntasks=16 --ntasks-per-node=8 --mpi=pmix "
        "bash preflight.sh collective /opt/alltoall_perf -b 8G -e 8G -g 1 -c 1 -n 20\n"
    )
    environ = (tmp_path / "environ").read_text().splitlines()
    assert {"MOEKIT_TRY_A=x y", "MOEKIT_PREFLIGHT_LIBRARY_PATH=/a:/b"} <= set(environ)


def test_all_reduce_lies_beside_it(tmp_path: Path) -> None:
    assert Measurer(tmp_path, PROFILE).program("allreduce") == "/opt/all_reduce_perf"


def test_in_an_image_the_folder_is_the_same(srun: Path, tmp_path: Path) -> None:
    does(srun, 'echo "$@" >argv')
    inside = {**PROFILE, "srun": ["--container-image=/x.sqsh"]}
    Measurer(tmp_path / "logs", inside).measure([Asked("alltoall", ("n1",))])
    assert (
        f"--container-image=/x.sqsh --container-workdir={tmp_path} bash preflight.sh" in (tmp_path / "argv").read_text()
    )


def test_what_hangs_is_ended_and_its_tasks_with_it(srun: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "TIMEOUT_S", 0.5)
    does(srun, 'trap "touch told; exit 143" TERM; sleep 60 & wait')
    ((measured, _),) = Measurer(tmp_path / "logs", PROFILE).measure([Asked("alltoall", ("n1",))])
    assert measured.problem == "it did not end within 0 s"
    assert (tmp_path / "told").exists()


def test_many_nodes_are_not_all_measured_at_once(srun: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "AT_ONCE", 2)
    does(srun, "mkdir -p now most; touch now/$$; ls now >most/$$; sleep 0.2; rm now/$$")
    asked = [Asked("alltoall", (f"n{number}",)) for number in range(5)]
    results = Measurer(tmp_path / "logs", PROFILE).measure(asked)
    assert [log.name[:3] for _, log in results] == ["001", "002", "003", "004", "005"]
    assert max(len(path.read_text().split()) for path in (tmp_path / "most").iterdir()) <= 2


def test_an_image_is_told_from_another_under_its_name(tmp_path: Path) -> None:
    image = tmp_path / "x.sqsh"
    assert _identity(str(image)) == str(image)
    image.write_bytes(b"12345")
    assert _identity(str(image)) == f"{image} (5 bytes)"
    (tmp_path / "x.sqsh.json").write_text('{"sha256": "0123456789abcdef0123"}')
    assert _identity(str(image)) == f"{image} (sha256 0123456789abcdef)"
    (tmp_path / "x.sqsh.json").write_text('{"sha256": null}')
    assert _identity(str(image)) == f"{image} (5 bytes)"
