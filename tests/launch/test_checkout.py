"""The Megatron checkout that jobs mount is what recipes were checked against, or no job is submitted."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from moekit.launch import provenance
from moekit.launch.checkout import look_at

INFO = "MAJOR = 0\nMINOR = 19\nPATCH = 2\nPRE_RELEASE = ''\n"


def git(folder: Path, *words: str) -> str:
    said = ["git", "-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false", *words]
    return subprocess.run(said, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "Megatron-LM"
    (folder / "megatron/core").mkdir(parents=True)
    (folder / "megatron/core/package_info.py").write_text(INFO)
    (folder / ".gitignore").write_text("*.so\n__pycache__\n")
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "a")
    return folder


def whats(checkout: Path, version: str = "0.19.2", commit: str = "") -> list[str]:
    return [problem.what for problem in look_at(str(checkout), version, commit)[1]]


def test_a_clean_checkout(checkout: Path) -> None:
    head = git(checkout, "rev-parse", "HEAD")
    (checkout / "megatron/core/helpers.so").touch()  # Megatron compiles this by itself
    found, problems = look_at(str(checkout), "0.19.2")
    assert problems == []
    assert found is not None
    assert (found.version, found.commit) == ("0.19.2", head)
    assert whats(checkout, head[:9]) == []
    assert whats(checkout, commit=head) == []


def test_changes_are_refused(checkout: Path) -> None:
    (checkout / "megatron/core/package_info.py").write_text(f"{INFO}# mine\n")
    (checkout / "sitecustomize.py").touch()  # new files change what is trained as well
    changed = "megatron/core/package_info.py, sitecustomize.py"
    _, (problem,) = look_at(str(checkout), "0.19.2")
    assert problem.what == f"the Megatron checkout has changes that no commit holds: {changed}"
    assert problem.hint == f"`git -C {checkout} stash --include-untracked` puts them aside"
    for number in range(3):
        (checkout / f"new{number}.py").touch()
    assert whats(checkout)[0].endswith("new0.py, new1.py and 2 more")


def test_another_commit_is_refused(checkout: Path) -> None:
    head = git(checkout, "rev-parse", "HEAD")
    _, (problem,) = look_at(str(checkout), "d6316eb45")
    assert problem.what == (
        f"the Megatron checkout is Megatron 0.19.2 at {head[:9]}, and the recipe is for `d6316eb45`: {checkout}"
    )
    assert problem.hint.startswith(f"`git -C {checkout} checkout d6316eb45`")
    assert "checkout core_v0.20.0`" in look_at(str(checkout), "0.20.0")[1][0].hint
    (checkout / "b").touch()
    git(checkout, "add", ".")
    git(checkout, "commit", "-q", "-m", "b")
    assert whats(checkout, commit=head)[0].endswith(f"and the run was begun with {head[:9]}: {checkout}")


def test_what_is_no_checkout(tmp_path: Path, checkout: Path) -> None:
    assert whats(tmp_path / "none") == [f"there is no Megatron checkout: {tmp_path / 'none'}"]
    (tmp_path / "empty").mkdir()
    assert whats(tmp_path / "empty")[0].startswith(f"`{tmp_path / 'empty'}` is no checkout of Megatron")
    subprocess.run(["rm", "-r", str(checkout / ".git")], check=True)
    assert whats(checkout)[0].startswith(f"`{checkout}` is in no git repository")


def test_an_image_is_told_without_reading_it(tmp_path: Path) -> None:
    image = tmp_path / "x.sqsh"
    image.write_bytes(b"hsqs")
    facts = provenance.image_facts(str(image))
    assert facts == {"path": str(image), "bytes": 4, "modified": int(image.stat().st_mtime), "sha256": None}
    digest = "0123456789abcdef" * 4
    Path(f"{image}.sha256").write_text(f"{digest}  x.sqsh\n")
    assert provenance.image_facts(str(image))["sha256"] == digest
    Path(f"{image}.sha256").write_text("nothing\n")
    assert provenance.image_facts(str(image))["sha256"] is None
    assert provenance.image_facts("nvcr.io#nvidia/pytorch:26.06-py3") == {"name": "nvcr.io#nvidia/pytorch:26.06-py3"}
    assert provenance.image_facts(str(tmp_path / "none"))["bytes"] is None


def test_what_changed_under_a_run(tmp_path: Path) -> None:
    """A further job trains on the same data in the same image; what was missing at launch may have come since."""
    image, data, tokenizer = tmp_path / "x.sqsh", tmp_path / "data", tmp_path / "tokenizer"

    def found() -> dict[str, Any]:
        return {
            "image": provenance.image_facts(str(image)),
            "data": provenance.folder_facts(data, provenance.DATA_FILES),
            "tokenizer": provenance.folder_facts(tokenizer, provenance.TOKENIZER_FILES),
        }

    nothing = found()
    assert [problem.what for problem in provenance.changed(nothing)] == [
        f"the image of this run is not there: {image}",
        f"the data of this run is not there: {data}",
        f"the tokenizer of this run is not there: {tokenizer}",
    ]
    image.write_bytes(b"hsqs")
    for folder in (data, tokenizer):
        folder.mkdir()
    (data / "data-args.txt").write_text("a")
    everything = found()
    assert provenance.changed(nothing) == provenance.changed(everything) == provenance.changed({}) == []
    image.write_bytes(b"hsqs anew")
    (data / "data-args.txt").write_text("b")
    assert [problem.what for problem in provenance.changed(everything)] == [
        f"the image is no longer what the run was launched with: {image}",
        f"the data is no longer what the run was launched with: {data}",
    ]
