"""`moekit megatron patch` on the files of the real Megatron: mended, mended again, taken back, refused."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from moekit.megatron.patch import CHANGES, TRAINING, UPCYCLING, changed, difference, read, state, write
from moekit.problems import MoekitError

pytestmark = pytest.mark.megatron


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the files of the installed Megatron that are changed."""
    wheel = importlib.metadata.distribution("megatron-core")
    for file in (TRAINING, UPCYCLING):
        (tmp_path / file).parent.mkdir(parents=True)
        shutil.copy(str(wheel.locate_file(file)), tmp_path / file)
    return tmp_path


def moekit(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "moekit", *words], capture_output=True, text=True, check=False)


def test_each_defect_is_mended_said_and_taken_back(checkout: Path) -> None:
    before = read(checkout)
    (checkout / TRAINING).chmod(0o640)
    done = moekit("megatron", "patch", str(checkout))
    assert done.returncode == 0, done.stderr
    first = [line.split(": ")[0].rpartition(":")[0] for line in done.stdout.splitlines()]
    assert first == [change.file for change in CHANGES]
    mended = read(checkout)
    assert {state(change, mended[change.file]) for change in CHANGES} == {"mended"}
    for file, text in mended.items():
        compile(text, file, "exec")
    assert (checkout / TRAINING).stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in (checkout / TRAINING).parent.iterdir()) == ["training.py"]

    again = moekit("megatron", "patch", str(checkout))
    assert again.stdout.count(": there already: ") == len(CHANGES)
    assert read(checkout) == mended
    undone = moekit("megatron", "patch", str(checkout), "--undo")
    assert undone.stdout.count(": taken back: ") == len(CHANGES)
    assert read(checkout) == before
    assert moekit("megatron", "patch", str(checkout), "--undo").stdout.count(": not there: ") == len(CHANGES)


def test_each_line_that_is_said_holds_the_defect(checkout: Path) -> None:
    texts = read(checkout)
    for change, line in zip(CHANGES, changed(texts)[1], strict=True):
        number = int(line.split(":")[1])
        assert texts[change.file].splitlines()[number - 1] == change.wrong.splitlines()[0]


def test_the_difference_is_one_that_git_takes(checkout: Path) -> None:
    before = read(checkout)
    printed = moekit("megatron", "patch", str(checkout), "--print")
    assert read(checkout) == before
    (checkout / "upcycling.patch").write_text(printed.stdout)
    subprocess.run(["git", "apply", "upcycling.patch"], cwd=checkout, check=True)
    assert read(checkout) == changed(before)[0]
    assert moekit("megatron", "patch", str(checkout), "--print").stdout == ""


def upstream(texts: Mapping[str, str]) -> dict[str, str]:
    """The files with upstream's own repair of what it has repaired since, or may."""
    new = dict(texts)
    for change in CHANGES:
        for fixed in change.fixed:
            new[change.file] = new[change.file].replace(change.wrong, fixed)
    return new


def test_what_upstream_has_mended_is_left_alone(checkout: Path) -> None:
    texts = upstream(read(checkout))
    new, said = changed(texts)
    assert new[UPCYCLING] == texts[UPCYCLING]
    assert ["right as upstream has it" in line for line in said] == [bool(change.fixed) for change in CHANGES]
    assert changed(new, undo=True)[0] == texts


def test_another_megatron_is_refused_whole(checkout: Path) -> None:
    text = (checkout / TRAINING).read_text()
    (checkout / TRAINING).write_text(text.replace("model_config = cfg.model\n", "model_config = cfg.models[0]\n"))
    before = read(checkout)
    refused = moekit("megatron", "patch", str(checkout))
    assert (refused.returncode, refused.stdout) == (1, "")
    looked_for = "model_config = cfg.model builder_cls = model_config.get_builder_cls()"
    assert refused.stderr.startswith(f"{TRAINING}: this Megatron is another than those known: `{looked_for}`")
    assert read(checkout) == before


def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MoekitError, match="cannot be read: no such file or directory"):
        read(tmp_path)


def test_a_file_that_is_not_utf8_is_refused(checkout: Path) -> None:
    (checkout / UPCYCLING).write_bytes(b"\xff")
    with pytest.raises(MoekitError, match="is not UTF-8"):
        read(checkout)


def test_a_checkout_that_cannot_be_written_is_refused(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = read(checkout)

    def full(path: Path, _: bytes) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(MoekitError, match="cannot be written: no space left on device"):
        write(checkout, old, changed(old)[0])
    assert read(checkout) == old


def test_nothing_to_change_is_no_difference(checkout: Path) -> None:
    texts = read(checkout)
    assert difference(texts, texts) == ""
