"""`moekit data tokenize` on small data sets: the same bytes as a plain writer's, whatever happens in between."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small import END
from tokenized import (
    a_dataset,
    command,
    make_root,
    make_texts,
    moekit,
    plain,
    shard_bytes,
    visible,
    write_description,
    write_texts,
)

from moekit.data.making.encoding import BATCH_BYTES, _batches, _pieces
from moekit.data.making.here import tokenize_here
from moekit.data.making.parts import Step, find_part, part_prefix
from moekit.data.making.shards import find_shard, make_shard
from moekit.data.planning import folder_of, make_plan, settle_plan
from moekit.problems import MoekitError


def refused(call: Any, *given: Any, **named: Any) -> str:
    with pytest.raises(MoekitError) as raised:
        call(*given, **named)
    return str(raised.value)


@pytest.mark.parametrize(
    ("large", "tasks", "workers", "ending"),
    [(False, 1, 1, "jsonl"), (False, 3, 2, "jsonl.gz"), (False, 2, 3, "parquet"), (True, 2, 2, "parquet")],
)
def test_shards_are_those_of_a_plain_writer(tmp_path: Path, large: bool, tasks: int, workers: int, ending: str):
    root, texts = make_root(tmp_path / "root", large), make_texts(files=5)
    texts[2][3] = f"{END} in the text<|begin_of_text|>{END}"
    write_texts(tmp_path / "text", texts, ending)
    done = tokenize_here(a_dataset(tmp_path / "text", tasks=tasks), root, workers=workers)
    assert done.plan.token_type == ("<i4" if large else "<u2")
    for task in range(tasks):
        expected = plain(root, [text for file in texts[task::tasks] for text in file])
        assert shard_bytes(done.folder, "some", task) == expected
    assert sum(record.documents for record in done.records) == sum(map(len, texts))
    assert not (done.folder.path / ".parts").exists()


@pytest.mark.megatron
def test_megatron_reads_what_was_written(tmp_path: Path):
    import numpy as np
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    root, texts = make_root(tmp_path / "root"), make_texts(files=2)
    write_texts(tmp_path / "text", texts)
    done = tokenize_here(a_dataset(tmp_path / "text"), root)
    read = IndexedDataset(str(done.folder.prefix("some", 0)))
    documents = [read[at] for at in range(len(read))]
    assert len(documents) == 24
    assert np.concatenate(documents).tobytes() == plain(root, [*texts[0], *texts[1]])[0]
    assert {int(document[-1]) for document in documents} == {done.plan.end_of_document_id}


def test_pieces_make_up_the_text_and_fit():
    text = ("several lines of 混合 text\n" * 3 + "🧑‍🔬" * 40) * 20
    for most in (7, 100, 1000, 10**6):
        pieces = list(_pieces(text, most))
        assert "".join(piece for piece, _, _ in pieces) == text
        assert all(len(piece.encode()) == size <= most for piece, size, _ in pieces)
        assert [is_last for _, _, is_last in pieces] == [False] * (len(pieces) - 1) + [True]
    assert all(piece.endswith("\n") for piece, _, _ in list(_pieces("line\n" * 50, 12))[:-1])


def test_batches_are_as_large_as_said_and_no_text_is_lost():
    texts = ["x" * (BATCH_BYTES // 3)] * 7 + ["y" * (BATCH_BYTES * 2 + 5), "z"]
    batches = list(_batches(texts, BATCH_BYTES))
    assert "".join(piece for batch in batches for piece, _ in batch) == "".join(texts)
    assert all(sum(len(piece) for piece, _ in batch) <= BATCH_BYTES for batch in batches)
    assert sum(is_last for batch in batches for _, is_last in batch) == len(texts)


def test_a_long_document_is_one_document(tmp_path: Path):
    root = make_root(tmp_path / "root")
    long = "a few of many experts\n" * 100_000
    write_texts(tmp_path / "text", [["before", long, "after"]])
    done = tokenize_here(a_dataset(tmp_path / "text", max_document_mib=1), root)
    assert done.records[0].documents == 3
    assert shard_bytes(done.folder, "some", 0) == plain(root, ["before", long, "after"])


def test_a_rerun_touches_nothing_that_is_whole(tmp_path: Path):
    root = make_root(tmp_path / "root")
    write_texts(tmp_path / "text", make_texts())
    first = tokenize_here(a_dataset(tmp_path / "text", tasks=2), root)
    times = {path: path.stat().st_mtime_ns for path in first.folder.path.rglob("*") if path.is_file()}
    again = tokenize_here(a_dataset(tmp_path / "text", tasks=2), root)
    assert (first.made, again.made, again.records) == (2, 0, first.records)
    assert {path: path.stat().st_mtime_ns for path in times} == times


@pytest.mark.parametrize("damage", ["gone", "cut"])
def test_a_shard_that_is_not_as_put_down_is_made_again_and_told(
    tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
):
    root = make_root(tmp_path / "root")
    write_texts(tmp_path / "text", make_texts())
    done = tokenize_here(a_dataset(tmp_path / "text", tasks=2), root)
    before = visible(done.folder.path)
    file = done.folder.path / "some_00001_tokens.bin"
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-2])
    capsys.readouterr()
    assert tokenize_here(a_dataset(tmp_path / "text", tasks=2), root).made == 1
    assert visible(done.folder.path) == before
    assert "shard 1 is made again: `some_00001_tokens.bin`" in capsys.readouterr().err


def test_a_part_that_is_whole_is_used_and_one_that_is_not_is_made_again(tmp_path: Path):
    root, texts = make_root(tmp_path / "root"), make_texts(files=3)
    paths = write_texts(tmp_path / "text", texts)
    plan = make_plan(a_dataset(tmp_path / "text"), root)
    folder = folder_of(root, "some")
    settle_plan(folder, plan)
    good, paths[2] = paths[2].read_bytes(), paths[2]
    stat = paths[2].stat()
    paths[2].write_bytes(good[:-3] + b"???")
    import os

    os.utime(paths[2], ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert f"{paths[2]}:12" in refused(make_shard, folder, plan, 0, 1, lambda step: None)
    assert [find_part(part_prefix(folder, 0, number)) is not None for number in range(3)] == [True, True, False]
    assert find_shard(folder, plan, 0) is None
    assert visible(folder.path).keys() == {".parts/00000/" + name for name in
                                           ("00000.bin", "00000.idx", "00001.bin", "00001.idx",
                                            ".tmp-00002.bin")}  # fmt: skip
    paths[2].write_bytes(good)
    os.utime(paths[2], ns=(stat.st_atime_ns, stat.st_mtime_ns))
    part = part_prefix(folder, 0, 1).with_name("00001.bin")
    part.write_bytes(part.read_bytes()[:-2])
    steps: list[Step] = []
    make_shard(folder, plan, 0, 1, steps.append)
    assert [step.documents for step in steps if step.reused] == [12]
    assert shard_bytes(folder, "some", 0) == plain(root, [text for file in texts for text in file])


def test_another_plan_is_refused_with_all_that_differs(tmp_path: Path):
    root = make_root(tmp_path / "root")
    paths = write_texts(tmp_path / "text", make_texts())
    done = tokenize_here(a_dataset(tmp_path / "text", tasks=2), root)
    before = visible(done.folder.path)
    paths[1].write_text(paths[1].read_text() + '{"text": "more"}\n')
    write_texts(tmp_path / "more", [["new"]])
    other = a_dataset(tmp_path / "text", tmp_path / "more", tasks=3, keep_fraction=0.5)
    told = refused(tokenize_here, other, root)
    for phrase in (
        "`tasks` was `2` and is `3`",
        "`keep_fraction` was `null` and is `0.5`",
        f"1 input file is changed: `{paths[1]}`",
        f"1 input file is new: `{tmp_path}/more/000.jsonl`",
        "hint: tokenize under another `name`",
    ):
        assert phrase in told
    assert visible(done.folder.path) == before


def test_other_versions_or_another_tokenizer_are_refused(tmp_path: Path):
    root = make_root(tmp_path / "root")
    write_texts(tmp_path / "text", make_texts(files=1))
    plan = make_plan(a_dataset(tmp_path / "text"), root)
    folder = folder_of(root, "some")
    old = replace(plan, versions=plan.versions | {"tokenizers": "0.1"})
    settle_plan(folder, old)
    assert "`tokenizers` was `0.1` and is" in refused(settle_plan, folder, plan)
    assert "begun with datatrove" in refused(make_shard, folder, old, 0, 1, lambda step: None)
    file = root / "tokenizers" / "tiny" / "tokenizer.json"
    file.write_text(file.read_text() + "\n")
    assert "`tokenizer_sha256` was" in refused(tokenize_here, a_dataset(tmp_path / "text"), root)
    assert "the tokenizer is another" in refused(make_shard, folder, plan, 0, 1, lambda step: None)
    assert visible(folder.path) == {}


def test_a_file_that_changes_under_a_plan_is_refused_by_name(tmp_path: Path):
    root = make_root(tmp_path / "root")
    (path,) = write_texts(tmp_path / "text", make_texts(files=1))
    plan = make_plan(a_dataset(tmp_path / "text"), root)
    settle_plan(folder := folder_of(root, "some"), plan)
    path.write_text(path.read_text() * 2)
    told = refused(make_shard, folder, plan, 0, 1, lambda step: None)
    assert told.startswith(f"{path}: the file has changed since its tokenization was planned: ")
    path.unlink()
    assert refused(make_shard, folder, plan, 0, 1, lambda step: None).startswith(f"{path}: cannot be read")


def test_a_sample_goes_to_its_own_folder(tmp_path: Path):
    root, texts = make_root(tmp_path / "root"), make_texts()
    write_texts(tmp_path / "text", texts)
    done = tokenize_here(a_dataset(tmp_path / "text", tasks=2), root, limit=3)
    assert done.folder.path == root / "data" / "some-sample"
    assert done.plan.is_sample
    expected = plain(root, [*texts[0][:3], *texts[2][:3]])
    assert shard_bytes(done.folder, "some-sample", 0) == expected
    assert not (root / "data" / "some").exists()


HOLD = """
import sys
from pathlib import Path
from moekit.data.locking import locked
from moekit.data.plan import DataFolder
with locked(DataFolder(Path(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_two_at_once_are_refused_and_two_shards_are_not(tmp_path: Path):
    root = make_root(tmp_path / "root")
    write_texts(tmp_path / "text", make_texts())
    plan = make_plan(a_dataset(tmp_path / "text", tasks=2), root)
    settle_plan(folder := folder_of(root, "some"), plan)
    words = [sys.executable, "-c", HOLD, str(folder.path), "1", "1"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout
        assert holder.stdout.readline() == "held\n"
        assert "another moekit is making shard 1" in refused(make_shard, folder, plan, 1, 1, lambda step: None)
        assert "another moekit is tokenizing here" in refused(
            tokenize_here, a_dataset(tmp_path / "text", tasks=2), root
        )
        assert visible(folder.path) == {}
        assert make_shard(folder, plan, 0, 1, lambda step: None).task == 0
        assert holder.stdin
        holder.stdin.close()
    assert tokenize_here(a_dataset(tmp_path / "text", tasks=2), root).made == 1


DISK = r"""
mount -t tmpfs -o size=$1 none "$2" && cp -r "$3/tokenizers" "$2/" || exit 77
shift 2; root=$PWD/disk; shift
"$@"; echo "first $?"
find "$root/data/some/"*_tokens.* "$root/data/some/shards/"* 2>/dev/null | sed 's/^/left /'
mount -o remount,size=200m "$root" && "$@" >&2; echo "second $?"
cp -r "$root/data" "$PWD/kept"
"""


@pytest.mark.parametrize("size", ["400k", "1000k", "1400k"])
def test_a_full_disk(tmp_path: Path, size: str):
    """A real file system without room: for the parts, for the shard beside them; the rerun goes on."""
    root, texts = make_root(tmp_path / "root"), make_texts(files=4, documents=1200)
    write_texts(tmp_path / "text", texts)
    (tmp_path / "disk").mkdir()
    description = write_description(tmp_path / "some.yaml", tmp_path / "text")
    words = ["unshare", "-rm", "bash", "-c", DISK, "bash", size, tmp_path / "disk", root]
    done = subprocess.run(
        [*map(str, words), *command(description, tmp_path / "disk")], cwd=tmp_path, capture_output=True, text=True
    )
    if done.returncode == 77 or "unshare:" in done.stderr:
        pytest.skip(f"no file system can be mounted here: {done.stderr}")
    assert "first 1\n" in done.stdout, done.stdout + done.stderr
    assert "cannot be written: no space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    assert "left" not in done.stdout
    assert "second 0\n" in done.stdout, done.stderr
    expected = plain(root, [text for file in texts for text in file])
    assert shard_bytes(replace(folder_of(root, "some"), path=tmp_path / "kept" / "some"), "some", 0) == expected


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path):
    root = make_root(tmp_path / "root")
    write_texts(tmp_path / "text", make_texts(files=1))
    (root / "data").write_text("a file")
    told = refused(tokenize_here, a_dataset(tmp_path / "text"), root)
    assert f"{root}/data" in told
    assert "cannot be written" in told


def test_the_command_says_what_came_of_it(tmp_path: Path):
    root = make_root(tmp_path / "root")
    write_texts(tmp_path / "text", [["one", "", "two"], [None, "three"]])
    description = write_description(tmp_path / "some.yaml", tmp_path / "text")
    done = moekit(description, root)
    lines = done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (0, "")
    assert lines[0].startswith("some: 1 shard, 3 documents, ")
    assert "  left out    2 without text, of 5 rows" in lines
    assert lines[-1] == "  next        moekit data manifest some"
    said = json.loads(moekit(description, root, "--json").stdout)
    assert (said["shards"], said["made"], said["documents"], said["rows"], said["empty"]) == (1, 0, 3, 5, 2)
