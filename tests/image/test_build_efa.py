"""`build_efa.sh` and `moekit image build efa`, on real squashfs files."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from image_site import ROOT, Machine

from moekit.image.record import is_whole, record_of

Base = Callable[[], Path]


@pytest.fixture
def base(root_of: Callable[[str], Path], squashed: Callable[[Path, str], Path]) -> Path:
    return squashed(root_of("root"), "pytorch-26.06.sqsh")


def inside(image: Path, name: str) -> str:
    done = subprocess.run(["unsquashfs", "-cat", str(image), name], capture_output=True, text=True, check=True)
    return done.stdout


def left(machine: Machine) -> list[str]:
    """What lies beside the images and is none of the test's."""
    names = {"data", "bin", "config", "registry", "cache", "run", "root"}
    return sorted(path.name for path in machine.folder.iterdir() if path.name not in names)


def test_an_image_is_built(machine: Machine, base: Path) -> None:
    base.with_name(f"{base.name}.json").write_text('{\n "image": "pytorch-26.06.sqsh",\n "from": "docker://a#b:1"\n}\n')
    out = machine.folder / "efa.sqsh"
    done = machine.moekit("image", "build", "efa", "--base", str(base), "-o", str(out))
    assert done.returncode == 0, done.stderr
    assert is_whole(out)
    assert machine.containers == []
    assert left(machine) == ["efa.sqsh", "efa.sqsh.json", base.name, f"{base.name}.json"]
    record = record_of(out)
    assert record is not None
    assert record["efa"] == {
        "efa_installer": "1.49.0",
        "libfabric": "2.4.0amzn1.0",
        "aws_ofi_nccl": "v1.19.2",
        "nccl": record["efa"]["nccl"],
        "cuda": "13.2.0",
    }
    assert record["base"] == {"image": "pytorch-26.06.sqsh", "from": "docker://a#b:1"}
    assert (record["image"], record["bytes"]) == ("efa.sqsh", out.stat().st_size)
    assert record["sha256"] == subprocess.run(["sha256sum", str(out)], capture_output=True, text=True).stdout[:64]
    assert json.loads(inside(out, "opt/amazon/moekit-efa.json")) == record["efa"]
    assert inside(out, "opt/efa-options") == "-y --skip-kmod --skip-limit-conf --no-verify\n"
    assert "--with-libfabric=/opt/amazon/efa --with-cuda=/usr/local/cuda" in inside(out, "opt/ofi-options")
    assert inside(out, "srv/asked").splitlines() == [
        "https://efa-installer.amazonaws.com/aws-efa-installer-1.49.0.tar.gz",
        "https://github.com/aws/aws-ofi-nccl/releases/download/v1.19.2/aws-ofi-nccl-1.19.2.tar.gz",
    ]
    assert "aws-ofi-nccl v1.19.2 for NCCL" in done.stdout

    before = out.stat()
    again = machine.moekit("image", "build", "efa", "--base", str(base), "-o", str(out))
    assert again.returncode == 0
    assert "is there already" in again.stdout
    assert out.stat() == before


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    ("fails", "said"),
    [
        ("create-space", "no space is left for the image"),
        ("export-half", "no space is left for the image"),
        ("export-cut", "the image is cut off, and gets no name"),
        ("export-killed", "building the image failed"),
    ],
)
def test_half_an_image_has_no_name_and_a_rerun_makes_it(machine: Machine, base: Path, fails: str, said: str) -> None:
    out = machine.folder / "efa.sqsh"
    words = ("image", "build", "efa", "--base", str(base), "-o", str(out))
    done = machine.moekit(*words, STANDIN_FAILS=fails)
    assert done.returncode == 1
    assert said in done.stderr.splitlines()[-2], done.stderr
    assert "hint: " in done.stderr.splitlines()[-1]
    assert not out.exists()
    assert not Path(f"{out}.json").exists()
    assert machine.containers == ([] if fails != "export-killed" else machine.containers[:1])
    again = machine.moekit(*words)
    assert again.returncode == 0, again.stderr
    assert is_whole(out)
    assert machine.containers == []


def test_a_name_that_is_taken(machine: Machine, base: Path) -> None:
    out = machine.folder / "efa.sqsh"
    out.write_text("something else")
    done = machine.script("build_efa.sh", str(base), str(out))
    assert (done.returncode, done.stderr) == (1, f"build_efa.sh: there is an image already: {out}\n")
    told = machine.moekit("image", "build", "efa", "--base", str(base), "-o", str(out))
    assert told.returncode == 1
    assert "nothing beside it says that it is an image with EFA" in told.stderr
    assert out.read_text() == "something else"


def test_two_at_once(machine: Machine, base: Path) -> None:
    out = machine.folder / "efa.sqsh"
    with subprocess.Popen(["flock", str(machine.folder / ".efa.sqsh.lock"), "sleep", "30"]) as holder:
        while not (machine.folder / ".efa.sqsh.lock").exists():
            pass
        done = machine.script("build_efa.sh", str(base), str(out))
        while "another process" not in done.stderr and holder.poll() is None:  # flock makes its file before it holds it
            done = machine.script("build_efa.sh", str(base), str(out))
        holder.kill()
    subprocess.run(["pkill", "-P", str(holder.pid)], check=False)
    assert done.stderr == f"build_efa.sh: another process is making {out}\n"


def test_a_plugin_that_would_not_load_is_no_image(
    machine: Machine, root_of: Callable[[str], Path], squashed: Callable[[Path, str], Path]
) -> None:
    """As where the image's libraries are older: NCCL would say no more than `Using network Socket`."""
    root = root_of("root")
    (root / "stubs" / "ldd").write_text(
        '#!/bin/sh\necho "$1: /lib/libefa.so.1: version \\`EFA_1.4\' not found (required by libfabric.so.1)" >&2\n'
    )
    (root / "stubs" / "ldd").chmod(0o755)
    base, out = squashed(root, "pytorch-26.06.sqsh"), machine.folder / "efa.sqsh"
    done = machine.moekit("image", "build", "efa", "--base", str(base), "-o", str(out))
    assert done.returncode == 1
    assert "version `EFA_1.4' not found" in done.stderr.splitlines()[-2]
    assert not out.exists()
    assert machine.containers == []


def test_a_base_that_is_cut_off(machine: Machine, base: Path) -> None:
    whole = base.read_bytes()
    assert is_whole(base)
    base.write_bytes(whole[: int.from_bytes(whole[40:48], "little") - 1])
    assert not is_whole(base)
    done = machine.moekit("image", "build", "efa", "--base", str(base))
    assert done.returncode == 1
    assert f"the base is no whole image: {base}" in done.stderr
    assert machine.script("build_efa.sh", str(base), "efa.sqsh").stderr.startswith("build_efa.sh: the base is no whole")


def test_the_dockerfile_is_its_twin() -> None:
    from moekit.image.known import versions

    text, said = (ROOT / "images" / "efa.Dockerfile").read_text(), versions()
    assert f"FROM {said['PYTORCH'].replace('#', '/')}\n" in text
    for name in ("EFA_INSTALLER", "AWS_OFI_NCCL"):
        assert f"ARG {name}={said[name]}\n" in text
    assert 'bash /tmp/install_efa.sh "$EFA_INSTALLER" "$AWS_OFI_NCCL"' in text
