"""The quickstart's data: made once, whole or not at all, and refused where something else lies in its place."""

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from moekit.data import python_docs
from moekit.data.quickstart import prepare_python_docs
from moekit.data.shards import check_tokens, held_out_unigram_entropy_nats, open_shard
from moekit.problems import MoekitError

CHILD = """
import sys
from pathlib import Path
from moekit.data.quickstart import prepare_python_docs
from moekit.problems import MoekitError, print_problems
try:
    print(prepare_python_docs(Path(sys.argv[1]), lambda text: print(text, flush=True)).tokens)
except MoekitError as refused:
    print_problems(refused.problems)
    sys.exit(1)
"""
WORKING = "tokenizing 238 pages of Python's documentation"
WAITING = "waiting for another process that prepares the same data"
TOKENS = 827_212


def start(root: Path, before: Callable[[], None] | None = None) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(root)], stdout=pipe, stderr=pipe, text=True, preexec_fn=before
    )


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def ignore(text: str) -> None:
    """Progress that nobody looks at."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("made")
    prepare_python_docs(root, ignore)
    return root


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    """A copy of the prepared data, to damage."""
    root = tmp_path / "root"
    subprocess.run(["cp", "-r", str(made), str(root)], check=True)
    return root


def test_the_first_call_makes_everything_and_the_second_nothing(tmp_path: Path):
    said: list[str] = []
    first = prepare_python_docs(tmp_path, said.append)
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    second = prepare_python_docs(tmp_path, said.append)

    assert said == [WORKING]
    assert (first.already, second.already) == (False, True)
    assert (first.documents, first.tokens) == (second.documents, second.tokens) == (238, TOKENS)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == stamps
    assert second.seconds < 0.5
    assert names(tmp_path / "data") == ["python-docs"]
    assert names(tmp_path / "tokenizers") == ["python-docs"]
    assert names(tmp_path / "data/python-docs") == [
        "data-args.txt",
        "manifest.json",
        "python-docs_00000_tokens.bin",
        "python-docs_00000_tokens.idx",
        "tokenize.log",
    ]
    assert names(tmp_path / "tokenizers/python-docs") == ["tokenizer.json", "tokenizer_config.json"]
    check_tokens(open_shard(first.prefix), end_of_document=0, vocabulary=python_docs.VOCABULARY)


def test_the_held_out_text_has_a_unigram_entropy_a_model_can_beat(made: Path):
    entropy_nats = held_out_unigram_entropy_nats(made / "data/python-docs/python-docs_00000_tokens", "95,5,0")

    assert entropy_nats == pytest.approx(6.497, abs=0.001)  # of at most ln 4096 = 8.318


def test_a_relative_root_gives_megatron_an_absolute_prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    prepared = prepare_python_docs(Path("here"), ignore)

    text = (tmp_path / "here/data/python-docs/data-args.txt").read_text()
    assert text == f"{prepared.prefix}\n" == f"{tmp_path}/here/data/python-docs/python-docs_00000_tokens\n"


def test_a_moved_root_points_at_its_own_files(root: Path):
    prefix = prepare_python_docs(root, ignore).prefix

    assert (root / "data/python-docs/data-args.txt").read_text() == f"{prefix}\n"
    assert prefix.is_relative_to(root)
    assert ".tmp" not in "".join(names(root / "data/python-docs"))


@pytest.mark.parametrize("name", ["two words", "tab\there", "surrogate\udcff"])
def test_a_path_that_megatron_would_misread_is_refused_before_anything_is_made(tmp_path: Path, name: str):
    with pytest.raises(MoekitError) as refused:
        prepare_python_docs(tmp_path / name, ignore)

    # A message shows `?` for what cannot be printed.
    folder = tmp_path / "".join(letter if letter.isprintable() else "?" for letter in name) / "data/python-docs"
    assert str(refused.value) == (
        f"error: Megatron cannot read data below `{folder}`: the path has a space or a character that cannot be "
        "printed\n    hint: run this in a folder whose path has neither, or with another `shared_root` in the profile"
    )
    assert names(tmp_path) == []


def test_a_killed_run_leaves_nothing_that_counts_and_the_next_one_finishes(tmp_path: Path):
    child = start(tmp_path)
    half_made = tmp_path / "data/.tmp-python-docs/python-docs_00000_tokens.bin"
    while not half_made.exists():
        assert child.poll() is None, child.communicate()
        time.sleep(0.001)
    os.kill(child.pid, signal.SIGKILL)
    child.communicate()
    assert names(tmp_path / "data") == [".python-docs.lock", ".tmp-python-docs"]

    prepared = prepare_python_docs(tmp_path, ignore)

    assert (prepared.already, prepared.tokens) == (False, TOKENS)
    assert names(tmp_path / "data") == ["python-docs"]


def test_ctrl_c_leaves_nothing_half_made(tmp_path: Path):
    child = start(tmp_path)
    half_made = tmp_path / "data/.tmp-python-docs/python-docs_00000_tokens.bin"
    while not half_made.exists():
        assert child.poll() is None, child.communicate()
        time.sleep(0.001)
    os.kill(child.pid, signal.SIGINT)
    _, stderr = child.communicate()

    assert stderr.rstrip().endswith("KeyboardInterrupt")
    assert names(tmp_path / "data") == []


def test_two_at_once_do_the_work_once(tmp_path: Path):
    (tmp_path / "data").mkdir()
    with (tmp_path / "data/.python-docs.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # so that both find it taken
        children = [start(tmp_path), start(tmp_path)]
        assert [child.stdout.readline().strip() for child in children if child.stdout] == [WAITING, WAITING]
    outputs = [child.communicate() for child in children]

    assert [child.returncode for child in children] == [0, 0], outputs
    said = [[line for line in stdout.splitlines() if line != WAITING] for stdout, _ in outputs]
    assert sorted(said) == [[str(TOKENS)], [WORKING, str(TOKENS)]]
    assert names(tmp_path / "data") == ["python-docs"]


@pytest.mark.parametrize(
    ("limit_bytes", "left"),
    [(100_000, []), (500_000, ["python-docs"])],
    ids=["no room for the tokenizer", "no room for the tokens"],
)
def test_a_full_disk_is_one_message_and_leaves_nothing_half_made(tmp_path: Path, limit_bytes: int, left: list[str]):
    import resource

    # The system calls fail as on a full disk, with another number (EFBIG for ENOSPC).
    child = start(tmp_path, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes)))
    _, stderr = child.communicate()

    assert child.returncode == 1
    assert stderr.partition(": ")[2] == (
        "cannot prepare the data: File too large\n"
        "    hint: run this again with a shared root that can be written to and has 10 MB of free space\n"
    )
    assert stderr.startswith(str(tmp_path))
    assert (names(tmp_path / "data"), names(tmp_path / "tokenizers")) == ([], left)
    assert prepare_python_docs(tmp_path, ignore).tokens == TOKENS


def test_a_root_that_is_a_file_is_one_message(tmp_path: Path):
    (tmp_path / "file").touch()

    with pytest.raises(MoekitError) as refused:
        prepare_python_docs(tmp_path / "file", ignore)

    assert str(refused.value).startswith(f"{tmp_path}/file/data: cannot prepare the data: Not a directory\n")


DATA, TOKENIZER = "data/python-docs", "tokenizers/python-docs"
CHANGES = [
    (
        lambda root: os.truncate(root / DATA / "python-docs_00000_tokens.bin", 10),
        DATA,
        "`python-docs_00000_tokens.bin` has 10 bytes, not 1,654,424",
    ),
    (
        lambda root: (root / DATA / "python-docs_00000_tokens.idx").unlink(),
        DATA,
        "`python-docs_00000_tokens.idx` is missing",
    ),
    (lambda root: (root / DATA / "manifest.json").unlink(), DATA, "it has no readable `manifest.json`"),
    (lambda root: (root / DATA / "manifest.json").write_text("{"), DATA, "it has no readable `manifest.json`"),
    (lambda root: (root / DATA / "manifest.json").write_text("[]"), DATA, "it has no readable `manifest.json`"),
    (
        lambda root: subprocess.run(["sed", "-i", "s/f97bfb/000000/", root / DATA / "manifest.json"], check=True),
        DATA,
        "it was made from another text or tokenizer than this moekit's",
    ),
    (
        lambda root: (root / TOKENIZER / "tokenizer.json").write_text("{}"),
        TOKENIZER,
        "its `tokenizer.json` is not that of this moekit",
    ),
    (
        lambda root: (root / TOKENIZER / "tokenizer_config.json").unlink(),
        TOKENIZER,
        "its `tokenizer_config.json` is not that of this moekit",
    ),
]


@pytest.mark.parametrize(("edit", "folder", "reason"), CHANGES)
def test_something_else_in_its_place_is_refused_and_kept(
    root: Path, edit: Callable[[Path], object], folder: str, reason: str
):
    edit(root)
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}

    with pytest.raises(MoekitError) as refused:
        prepare_python_docs(root, ignore)

    assert str(refused.value) == (
        f"{root}/{folder}: this is not the data that moekit puts here: {reason}\n"
        "    hint: move it away and run this again"
    )
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before


@pytest.mark.parametrize("folder", [DATA, TOKENIZER])
def test_only_the_missing_folder_is_made_again(root: Path, folder: str):
    (root / folder).rename(root / "away")

    prepared = prepare_python_docs(root, ignore)

    assert (prepared.already, prepared.tokens) == (False, TOKENS)
    for path in (root / "away").iterdir():
        if path.suffix in {".bin", ".idx", ".json"}:
            assert path.read_bytes() == (root / folder / path.name).read_bytes()
