"""Whatever a file holds: exit code 1, one message that names it, no traceback, no waiting, nothing done.

The message catalogue (tests/errors/) pins the words; here are the sizes, the file systems and the real command.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moekit.problems import MoekitError, Problem
from moekit.recipe import nodes
from moekit.recipe.load import MOST_BASES, load, load_partly


def moekit(*arguments: str, cwd: Path, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "moekit", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60, check=False, **options)  # type: ignore[call-overload,no-any-return]


def refused(path: Path) -> list[Problem]:
    """What is said of a file that cannot be loaded, in at most two seconds of the processor."""
    began = time.process_time()
    with pytest.raises(MoekitError) as caught:
        load(str(path))
    assert time.process_time() - began < 2
    return list(caught.value.problems)


LINE_OF_KEYS = "".join(f"key{n}: 1\n" for n in range(75_000))
LAUGHS = "a: &a [x, x]\n" + "".join(
    f"{new}: &{new} [*{old}, *{old}, *{old}, *{old}, *{old}, *{old}, *{old}, *{old}]\n"
    for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
LARGE = {
    "ten_megabytes": b"summary: " + b"x" * 10_000_000,
    "ten_megabytes_of_brackets": b"[" * 10_000_000,
    "brackets": b"[" * 100_000,
    "closed_brackets": b"[" * 100_000 + b"]" * 100_000,
    "braces": b"{a: " * 100_000,
    "indented": "".join(" " * n + "a:\n" for n in range(1, 1400)).encode(),
    "sequences": b"- " * 100_000,
    "aliases": LAUGHS.encode(),
    "nul_bytes": b"\0" * 100_000,
    "random_bytes": bytes(range(256)) * 100,
    "gzip": b"\x1f\x8b\x08\x00" + bytes(range(128, 256)),
    "utf16": "moe: {num_experts: 8}\n".encode("utf-16"),
    "surrogates": b"summary: \xed\xa0\x80\n",
    "keys": LINE_OF_KEYS.encode(),
    "one_key_often": b"a: 1\n" * 200_000,
    "items": b"balance: {type: [" + b"a," * 400_000 + b"]}",
    "one_long_key": b"k" * 1_000_000 + b": 1\n",
    "quotes": b'summary: "' + b'\\"' * 200_000,
    "long_number": b"model: {num_layers: " + b"9" * 900_000 + b"}\n",
    "long_float": b"schedule: {lr: 1e" + b"9" * 900_000 + b"}\n",
    "comments": b"#\n" * 500_000,
}


@pytest.mark.parametrize("name", LARGE)
def test_large_and_strange_files(name: str, tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(LARGE[name])
    problems = refused(path)
    assert problems
    assert all(problem.where.startswith(str(path)) for problem in problems)
    assert all(len(problem.what) < 300 for problem in problems)


def test_tags_run_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    for tag in ("!!python/object/apply:os.system", "!!python/object/new:subprocess.Popen", "!!python/name:os.system"):
        path.write_text(f"summary: {tag} [touch {tmp_path}/owned]\n")
        assert "YAML tag" in refused(path)[0].what
    assert not (tmp_path / "owned").exists()


def test_a_directory_is_no_recipe(tmp_path: Path) -> None:
    assert refused(tmp_path)[0].what.endswith("is a directory")


NO_FILES = ["", " ", "\0", "a\nb", "x" * 300, "x/" * 3000, "~", "/", "..", "\udcff", "*.yaml", "--help"]


@pytest.mark.parametrize("given", NO_FILES, ids=lambda given: ascii(given[:9]))
def test_a_name_that_is_no_file(given: str) -> None:
    with pytest.raises(MoekitError):
        load(given)


def test_a_dangling_link_is_no_recipe(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").symlink_to("nowhere.yaml")
    assert refused(tmp_path / "x.yaml")[0].what.startswith("there is no recipe")


def test_a_link_that_turns_back_is_no_recipe(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").symlink_to("x.yaml")
    assert refused(tmp_path / "x.yaml")[0].what.startswith("there is no recipe")


def test_a_file_inherits_from_itself_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("base: b.yaml\n")
    (tmp_path / "b.yaml").symlink_to("a.yaml")
    assert "inherits from itself" in refused(tmp_path / "a.yaml")[0].what


def test_bases_are_counted(tmp_path: Path) -> None:
    for n in range(1, MOST_BASES + 2):
        (tmp_path / f"{n}.yaml").write_text(f"base: {n + 1}.yaml\n" if n <= MOST_BASES else "summary: the last\n")
    assert "inherits through more than" in refused(tmp_path / "1.yaml")[0].what
    assert load(str(tmp_path / "2.yaml")).recipe.summary == "the last"


def test_a_file_that_vanishes_before_it_is_read(tmp_path: Path) -> None:
    with pytest.raises(MoekitError) as caught:
        nodes.read(tmp_path / "gone.yaml", "gone.yaml", [])
    assert caught.value.problems == (
        Problem("gone.yaml", "cannot be read: no such file or directory", "look for a slip in the path"),
    )


def test_a_base_under_a_file(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("base: x.yaml/dense.yaml\n")
    assert refused(tmp_path / "x.yaml")[0].what == "there is no recipe `x.yaml/dense.yaml`"


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="Linux's /proc")
def test_a_file_that_gives_an_error_when_it_is_read() -> None:
    assert refused(Path("/proc/self/mem"))[0].what == "cannot be read: input/output error"


def test_a_pipe_is_read_like_a_file(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.yaml"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=("summary: through a pipe\n",), daemon=True)
    writer.start()
    assert load(str(pipe)).recipe.summary == "through a pipe"
    writer.join(timeout=10)
    assert not writer.is_alive()


@pytest.fixture
def unreadable(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "x.yaml"
    path.write_text("summary: secret\n")
    path.chmod(0)
    yield path
    path.chmod(0o600)


def test_a_file_without_permission(unreadable: Path) -> None:
    """In a process without root's rights, which read anything."""
    script = "import os; from moekit.recipe.load import load; os.getuid() or os.setuid(65534); "
    script += f"load({str(unreadable)!r})"
    for folder in unreadable.parents[: -len(Path(tempfile.gettempdir()).parts)]:
        folder.chmod(0o755)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert "MoekitError" in done.stderr
    assert done.stderr.rstrip().endswith(f"{unreadable}: cannot be read: permission denied"), done.stderr


REAL = {
    "typo.yaml": "base: first_moe\nrouter: {topkk: 8}\n",
    "brackets.yaml": "[" * 100_000,
    "aliases.yaml": LAUGHS,
    "tag.yaml": "summary: !!python/object/apply:os.system [touch owned]\n",
    "itself.yaml": "base: itself.yaml\n",
    "empty.yaml": "",
    "missing.yaml": None,
    "control.yaml": 'base: first_moe\nrouter: {"a\\e[31mb\\nc": 1}\n',
}


@pytest.mark.parametrize("command", ["check", "show", "flags"])
@pytest.mark.parametrize("name", REAL)
def test_the_real_command(command: str, name: str, tmp_path: Path) -> None:
    if (text := REAL[name]) is not None:
        (tmp_path / name).write_text(text)
    done = moekit(command, name, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert name in done.stderr
    assert "\x1b" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if not line.startswith("    hint:")]
    assert len(lines) == (2 if command == "check" else 1), done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ([name] if text is not None else [])


def test_the_real_command_is_interrupted_while_it_waits(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.yaml"
    os.mkfifo(pipe)
    waiting = subprocess.Popen(
        [sys.executable, "-m", "moekit", "check", str(pipe)], stderr=subprocess.PIPE, text=True, cwd=tmp_path
    )
    try:
        time.sleep(2)
        waiting.send_signal(signal.SIGINT)
        _, printed = waiting.communicate(timeout=20)
    finally:
        waiting.kill()
        waiting.wait()
    assert waiting.returncode != 0
    assert "Traceback" not in printed


def test_a_wrong_recipe_does_not_hide_the_others(tmp_path: Path) -> None:
    done = moekit("check", "dense", "nowhere", "first_moe", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("3 recipes: 1 problem, checked against aws-p5")


def test_new_on_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    small = ["mount", "-t", "tmpfs", "-o", "size=4k,nr_inodes=10", "moekit-test", str(disk)]
    if subprocess.run(small, capture_output=True, check=False).returncode:
        pytest.skip("a small file system can only be mounted by root")
    try:
        (disk / "full").write_bytes(b"x" * 4096)
        done = moekit("new", "mine", cwd=disk)
        left = [path.name for path in disk.iterdir()]
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    assert left == ["full"]
    assert done.returncode == 1
    assert done.stderr == "error: cannot write `mine.yaml`: no space left on device\n"


def test_what_could_be_read_is_still_checked(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("base: first_moe\nrouter: {topkk: 8, topk: 4}\n")
    loaded = load_partly(str(path))
    assert loaded.recipe.router.topk == 4
    assert [problem.what for problem in loaded.problems] == ["unknown field `router.topkk`"]
