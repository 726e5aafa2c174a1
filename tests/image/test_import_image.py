"""`moekit image import`: by version, from a registry that is a folder, onto real squashfs files."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from image_site import HERE, ROOT, Machine

from moekit.cluster.profile import find_cluster
from moekit.image import known
from moekit.image.record import is_whole, record_of
from moekit.problems import MoekitError

REFERENCE = known.versions()["NCCL_TESTS"]


@pytest.fixture(autouse=True)
def registry(machine: Machine, stand_in: None) -> Path:
    """A registry that is a folder."""
    folder = machine.folder / "registry" / REFERENCE
    folder.mkdir(parents=True)
    (folder / "alltoall_perf").write_text("#!/bin/sh\n")
    return folder


def test_a_known_image(machine: Machine) -> None:
    out = machine.folder / "images" / "nccl-tests.sqsh"
    done = machine.moekit("image", "import", "nccl-tests", "--out", str(out), "--arch", "x86_64", "--json")
    assert done.returncode == 0, done.stderr
    assert is_whole(out)
    record = record_of(out)
    assert record is not None
    assert json.loads(done.stdout) == {"image": str(out), "made": True, "record": record}
    assert (record["from"], record["arch"]) == (f"docker://{REFERENCE}", "x86_64")
    assert sorted(path.name for path in out.parent.iterdir()) == ["nccl-tests.sqsh", "nccl-tests.sqsh.json"]
    again = machine.moekit("image", "import", "nccl-tests", "--out", str(out), "--json")
    assert json.loads(again.stdout)["made"] is False
    other = machine.moekit("image", "import", "pytorch", "--out", str(out))
    assert other.returncode == 1
    assert f"is another image: docker://{REFERENCE}" in other.stderr


@pytest.mark.parametrize(
    ("fails", "said", "hint"),
    [
        ("import-refused", "`public.ecr.aws` wants to know who asks", ".credentials"),
        ("import-dns", "this node does not know `public.ecr.aws`", "https_proxy"),
        ("import-space", "no space is left for the image", "ENROOT_TEMP_PATH"),
    ],
)
def test_what_fails_is_told_and_a_rerun_finishes(machine: Machine, fails: str, said: str, hint: str) -> None:
    out = machine.folder / "nccl-tests.sqsh"
    done = machine.moekit("image", "import", "nccl-tests", "--out", str(out), STANDIN_FAILS=fails)
    assert done.returncode == 1
    assert said in done.stderr.splitlines()[-2]
    assert hint in done.stderr.splitlines()[-1]
    assert not out.exists()
    assert machine.moekit("image", "import", "nccl-tests", "--out", str(out)).returncode == 0
    assert is_whole(out)


def test_a_tag_that_is_gone(machine: Machine, registry: Path) -> None:
    shutil.rmtree(registry)
    done = machine.moekit("image", "import", "nccl-tests", "--out", "x.sqsh")
    assert (
        "the registry has no such image: https://public.ecr.aws/v2/hpc-cloud/nccl-tests/manifests/cuda" in done.stderr
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("docker://public.ecr.aws#hpc-cloud/nccl-tests:latest", "names no version: `latest` is another image tomorrow"),
        ("docker://public.ecr.aws#hpc-cloud/nccl-tests", "names no version: without a tag it is another"),
        ("docker://public.ecr.aws/hpc-cloud/nccl-tests:1", "is no address that enroot takes"),
        ("docker://a.b#c:1; touch p", "is no address that enroot takes"),
        ("pytorh", "there is no image `pytorh`"),
    ],
)
def test_an_image_has_a_version(given: str, said: str) -> None:
    with pytest.raises(MoekitError) as refused:
        known.find(given)
    assert said in str(refused.value)


def test_names_and_files() -> None:
    digest = f"docker://a.b#c/d@sha256:{'0' * 64}"
    assert known.find(digest) == known.Known(digest, "d", digest)
    assert all(":latest" not in image.uri and ":" in image.uri.partition("#")[2] for image in known.known().values())
    pytorch = known.find("pytorch")
    assert pytorch.uri == "docker://nvcr.io#nvidia/pytorch:26.06-py3"
    arch = known.default_arch(find_cluster("gb200"))
    assert known.file_name(pytorch, arch) == Path(find_cluster("gb200").image or "").name
    assert known.file_name(pytorch, known.default_arch(find_cluster("h100-ib"))) == "pytorch-26.06.sqsh"
    aws = find_cluster("aws-p5")
    assert known.file_name(known.find("nccl-tests"), None) == Path(aws.nccl_tests_image or "").name


def path_without_enroot(path: str) -> str:
    """The folders of a PATH that have none."""
    return ":".join(folder for folder in path.split(":") if not Path(folder, "enroot").exists())


def test_on_a_node_where_enroot_is_not_here(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """srun is asked for one, with the profile's partition."""
    from moekit.image.make import command_for

    profile = find_cluster("aws-p5")
    (machine.folder / "bin" / "enroot").unlink()
    monkeypatch.setenv("PATH", without := path_without_enroot(machine.env["PATH"]))
    machine.env["PATH"] = without
    with pytest.raises(MoekitError, match="there is no `enroot` on this machine"):
        command_for("import.sh", ["u", "o"], None, gpu=False)
    srun = machine.folder / "bin" / "srun"
    srun.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\nexit 1\n')
    srun.chmod(0o755)
    text = (ROOT / "slurm" / "clusters" / "aws-p5.yaml").read_text().replace("/fsx/moekit", str(machine.folder))
    (machine.folder / "p.yaml").write_text(text.replace("partition: null", "partition: gpus", 1))
    done = machine.moekit("image", "import", "nccl-tests", "--profile", "p.yaml")
    assert profile.name in text
    assert done.stderr.splitlines()[:3] == ["--partition=gpus", "--nodes=1", "--ntasks-per-node=1"]
    assert done.stderr.splitlines()[3:5] == ["bash", str(ROOT / "images" / "import.sh")]


def test_scripts_are_clean_bash() -> None:
    scripts = [*map(str, sorted((ROOT / "images").glob("*.sh"))), str(HERE / "enroot")]
    done = subprocess.run(["shellcheck", "-x", *scripts], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == ""
