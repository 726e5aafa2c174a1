"""A machine with enroot: the real one where it is on PATH, else a stand-in; containers run in roots of their own."""

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from image_site import CONFIGURE, CURL, HERE, INSTALLER, MAKEFILE, ROOT, Machine, archive

REAL = shutil.which("enroot")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """enroot's folders are the test's own; a container sees this machine's /usr, as an image's own programs."""
    for name in ("data", "bin", "config/mounts.d", "registry", "cache", "run"):
        (tmp_path / name).mkdir(parents=True)
    mounts = ["/usr /usr none x-create=dir,rbind,ro", "/dev /dev none x-create=dir,rbind"]
    (tmp_path / "config" / "mounts.d" / "host.fstab").write_text("".join(f"{line}\n" for line in mounts))
    if not REAL:
        (tmp_path / "bin" / "enroot").symlink_to(HERE / "enroot")
    env = {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "PYTHONPATH": str(ROOT),
        "ENROOT_DATA_PATH": str(tmp_path / "data"),
        "ENROOT_CONFIG_PATH": str(tmp_path / "config"),
        "ENROOT_CACHE_PATH": str(tmp_path / "cache"),
        "ENROOT_RUNTIME_PATH": str(tmp_path / "run"),
        "STANDIN_REGISTRY": str(tmp_path / "registry"),
    }
    return Machine(tmp_path, env)


@pytest.fixture
def stand_in(machine: Machine) -> None:
    """The stand-in also where a real enroot is: what needs a registry, and what fails on demand."""
    enroot = machine.folder / "bin" / "enroot"
    enroot.unlink(missing_ok=True)
    enroot.symlink_to(HERE / "enroot")


@pytest.fixture
def root_of(tmp_path: Path) -> Callable[[str], Path]:
    """The root of a small base image, with what `install_efa.sh` downloads in /srv."""

    def make(name: str) -> Path:
        root = tmp_path / name
        for folder in ("etc", "opt", "srv", "proc", "tmp", "usr", "var/lib/apt", "stubs", "usr/local/cuda", "run"):
            (root / folder).mkdir(parents=True, exist_ok=True)
        for link in ("bin", "lib", "lib64", "sbin"):
            (root / link).symlink_to(f"usr/{link}")
        for stub, text in {"curl": CURL, "apt-get": "#!/bin/sh\necho apt-get $*\n"}.items():
            (root / "stubs" / stub).write_text(text)
            (root / "stubs" / stub).chmod(0o755)
        (root / "etc" / "environment").write_text("PATH=/stubs:/usr/bin:/bin:/usr/sbin\nCUDA_VERSION=13.2.0\n")
        greeting = root / "etc" / "greeting"
        greeting.write_text("==== PyTorch ====\n{not a record}\n")
        greeting.chmod(0o755)
        archive(root / "srv" / "aws-efa-installer-1.49.0.tar.gz", "aws-efa-installer", {"efa_installer.sh": INSTALLER})
        plugin = {"configure": CONFIGURE, "Makefile": MAKEFILE}
        archive(root / "srv" / "aws-ofi-nccl-1.19.2.tar.gz", "aws-ofi-nccl-1.19.2", plugin)
        return root

    return make


@pytest.fixture
def squashed(tmp_path: Path) -> Callable[[Path, str], Path]:
    """A folder as a squashfs file."""

    def make(root: Path, name: str) -> Path:
        out = tmp_path / name
        command = ["mksquashfs", str(root), str(out), "-noappend", "-quiet", "-no-progress", "-all-root"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return out

    return make
