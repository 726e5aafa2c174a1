"""`make quickstart` where it cannot work says so before it downloads or makes anything."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TOOLS = ("bash", "ls", "make", "sed", "touch", "uname")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder with what the Makefile reads, and a PATH in `bin` with the tools it calls and no Python."""
    folder = tmp_path / "clone"
    (folder / "bin").mkdir(parents=True)
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "requirements", folder / "requirements")
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found
        (folder / "bin" / tool).symlink_to(found)
    return folder


def make(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": str(folder / "bin"), "HOME": str(folder)}
    return subprocess.run(["make", *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


def program(folder: Path, name: str, text: str) -> None:
    path = folder / "bin" / name
    path.unlink(missing_ok=True)
    path.write_text(f"#!{os.path.realpath(folder / 'bin/bash')}\n{text}\n")
    path.chmod(0o755)


def refused(done: subprocess.CompletedProcess[str], folder: Path) -> str:
    assert done.returncode == 2
    assert "First run" not in done.stdout
    assert not (folder / ".venv").exists()
    return done.stderr


def test_make_alone_says_what_there_is(clone: Path) -> None:
    done = make(clone)
    assert done.returncode == 0
    assert done.stdout.startswith("make quickstart ")


def test_elsewhere_than_on_linux(clone: Path) -> None:
    program(clone, "uname", "echo Darwin")
    said = refused(make(clone, "quickstart"), clone)
    assert "run it on a Linux machine or in a Linux container" in said
    assert "pip install . && moekit check first_moe" in said


def test_below_a_folder_with_a_space(clone: Path) -> None:
    folder = clone.rename(clone.with_name("my clone"))
    assert f"Megatron reads no path with a space in it: move the folder '{folder}'" in refused(
        make(folder, "quickstart"), folder
    )


@pytest.mark.parametrize("target", ["quickstart", "lint"])
def test_without_a_python_that_fits(target: str, clone: Path) -> None:
    """A `python3.12` that cannot run, as pyenv leaves for a version it does not have, is passed over."""
    program(clone, "python3.12", "echo 'pyenv: python3.12: command not found' >&2; exit 127")
    said = refused(make(clone, target), clone)
    assert "No Python 3.12 or 3.13 with venv was found." in said
    assert f"make {target} PYTHON=/path/to/python3.12" in said


@pytest.mark.parametrize("how", ["PYTHON=", "python3.13", "pyenv"])
def test_the_first_python_that_really_runs_is_taken(how: str, clone: Path) -> None:
    program(clone, "python3.12", "exit 1")
    words = ["nowhere/venv/bin/python", "VENV=nowhere/venv"]
    if how == "PYTHON=":
        words.append(f"PYTHON={sys.executable}")
    elif how == "pyenv":
        shim = clone / ".pyenv/versions/3.12.1/bin"
        shim.mkdir(parents=True)
        (shim / "python3").symlink_to(sys.executable)
    else:
        program(clone, how, f'exec {sys.executable} "$@"')
    made = make(clone, *words)
    assert made.returncode == 0, made.stderr
    assert made.stdout.startswith("Python: ")
    assert (clone / "nowhere/venv/bin/python").exists()
