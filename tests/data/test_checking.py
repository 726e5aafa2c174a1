"""Each damage that Megatron takes, and each mix-up of whole files, is found and named; and what Megatron does."""

import hashlib
import json
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_shards import (
    END,
    TOKENIZER,
    VOCABULARY,
    a_plan,
    own_data_set,
    some_documents,
    write_data_set,
    write_pair,
    write_record,
)

from moekit.data.checking import pair as pair_module
from moekit.data.checking.folder import Report, check_folder, check_pairs
from moekit.data.checking.given import remove_damaged
from moekit.data.checking.pair import Expected, check_pair
from moekit.data.places import load_record
from moekit.data.plan import DataFolder, InputFile
from moekit.data.shards import bin_path, idx_path
from moekit.problems import MoekitError

RIGHT = Expected("<u2", END, VOCABULARY)
DOCUMENTS = [[5, 6, END], [7, END], [9, 9, 9, END], [8, END]]
LENGTHS, POINTERS, BOUNDS = 34, 34 + 16, 34 + 16 + 32


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    write_pair(tmp_path / "a.b_00000_tokens", DOCUMENTS)
    return tmp_path / "a.b_00000_tokens"


def put(path: Path, at: int, kind: str, value: Any) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(struct.pack(kind, value))


def cut(path: Path, size_bytes: int) -> None:
    with path.open("r+b") as file:
        file.truncate(size_bytes)


def add(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def other_bin(prefix: Path) -> None:
    other = prefix.with_name("other")
    write_pair(other, DOCUMENTS[1:])
    bin_path(other).replace(bin_path(prefix))
    idx_path(other).unlink()


Damage = Callable[[Path], object]
DAMAGES: dict[str, tuple[Damage, str]] = {
    ".bin missing": (lambda p: bin_path(p).unlink(), "lacks a.b_00000_tokens.bin"),
    ".idx missing": (lambda p: idx_path(p).unlink(), "lacks a.b_00000_tokens.idx"),
    "bad magic": (
        lambda p: put(idx_path(p), 0, "<B", 7),
        "has an .idx that is no index of Megatron's: its first bytes are wrong",
    ),
    "bad version": (
        lambda p: put(idx_path(p), 9, "<Q", 2),
        "has an .idx of version 2 with token type 8, not version 1 with type 4 or 8",
    ),
    ".idx truncated": (lambda p: cut(idx_path(p), 121), "has an .idx of 121 bytes, and its header says 122"),
    ".idx cut in its header": (
        lambda p: cut(idx_path(p), 30),
        "has an .idx that is no index of Megatron's: its first bytes are wrong",
    ),
    "count + 1": (
        lambda p: put(idx_path(p), 18, "<Q", 5),
        "has an .idx of 5 sequences and 5 bounds of documents, not one more",
    ),
    "count - 1": (
        lambda p: put(idx_path(p), 18, "<Q", 3),
        "has an .idx of 3 sequences and 5 bounds of documents, not one more",
    ),
    "bad dtype code": (
        lambda p: put(idx_path(p), 17, "<B", 77),
        "has an .idx of version 1 with token type 77, not version 1 with type 4 or 8",
    ),
    ".bin of 0 bytes": (
        lambda p: cut(bin_path(p), 0),
        "has a .bin of 0 bytes, and its .idx lists 22 or more",
    ),
    ".bin truncated by 1 byte": (
        lambda p: cut(bin_path(p), 21),
        "has a .bin of 21 bytes, and its .idx lists 22 or more",
    ),
    ".bin truncated by half": (
        lambda p: cut(bin_path(p), 11),
        "has a .bin of 11 bytes, and its .idx lists 22 or more",
    ),
    ".bin longer": (lambda p: add(bin_path(p), b"\1\0"), "has a .bin of 24 bytes, and its .idx lists 22"),
    ".idx longer": (lambda p: add(idx_path(p), b"\0"), "has an .idx of 123 bytes, and its header says 122"),
    "dtype code 8 to 4": (
        lambda p: put(idx_path(p), 17, "<B", 4),
        "has tokens of type <i4, and the plan's are <u2",
    ),
    "one length + 1": (
        lambda p: put(idx_path(p), LENGTHS + 4, "<i", 3),
        "has a pointer to document 2 that does not follow from the lengths before it",
    ),
    "a length of 0": (lambda p: put(idx_path(p), LENGTHS + 4, "<i", 0), "lists document 1 with 0 tokens"),
    "the last length + 1": (
        lambda p: put(idx_path(p), LENGTHS + 12, "<i", 3),
        "has a .bin of 22 bytes, and its .idx lists 24 or more",
    ),
    "document index wrong in the middle": (
        lambda p: put(idx_path(p), BOUNDS + 16, "<q", 3),
        "has a bound of documents, number 2, that is not 2",
    ),
    "a token of 2^16 - 1": (
        lambda p: put(bin_path(p), 6, "<H", 65535),
        "has token 65,535 in document 1, and the vocabulary ends at 999",
    ),
    ".bin of another shard, shorter": (other_bin, "has a .bin of 16 bytes, and its .idx lists 22 or more"),
    "negative pointer": (
        lambda p: put(idx_path(p), POINTERS + 8, "<q", -6),
        "has a pointer to document 1 that does not follow from the lengths before it",
    ),
    "an end token inside": (
        lambda p: put(bin_path(p), 10, "<H", END),
        "has the end token 0 before the end of document 2",
    ),
    "no end token": (
        lambda p: put(bin_path(p), 8, "<H", 5),
        "has a document, number 1, that does not end with the end token 0",
    ),
}
NOTICED_AT_OPEN = {
    *(".bin missing", ".idx missing", "bad magic", "bad version", ".idx truncated", ".idx cut in its header"),
    *("count + 1", "count - 1", "bad dtype code"),
}
"""What the real Megatron refuses to open."""
RUNS_OVER = ("dtype code 8 to 4", "the last length + 1", ".bin of another shard, shorter")
"""Where it reads past the end."""


@pytest.mark.parametrize("damage", DAMAGES)
def test_each_damage_is_found_and_named(damage: str, prefix: Path) -> None:
    act, said = DAMAGES[damage]
    assert check_pair(prefix, RIGHT).problem is None
    act(prefix)
    assert check_pair(prefix, RIGHT).problem == said
    assert check_pair(prefix, RIGHT, sha256=True).problem == said


@pytest.mark.parametrize("token", [-1, -(2**31), 2**31 - 1, 1000])
def test_an_id_of_four_bytes_outside_the_vocabulary(token: int, tmp_path: Path) -> None:
    write_pair(tmp_path / "wide", [[1, 2, END], [3, token, END]], "<i4")
    said = f"has token {token:,} in document 1, and the vocabulary ends at 999"
    assert check_pair(tmp_path / "wide", Expected("<i4", END, VOCABULARY)).problem == said


def test_tokens_of_four_bytes_read_as_of_two(tmp_path: Path) -> None:
    write_pair(tmp_path / "wide", DOCUMENTS, "<i4")
    put(idx_path(tmp_path / "wide"), 17, "<B", 8)
    assert (
        check_pair(tmp_path / "wide", Expected("<i4", END)).problem == "has tokens of type <u2, and the plan's are <i4"
    )
    said = "has a pointer to document 1 that does not follow from the lengths before it"
    assert check_pair(tmp_path / "wide", Expected(None, END)).problem == said


def test_a_whole_pair_says_what_it_holds(prefix: Path) -> None:
    found = check_pair(prefix, RIGHT, sha256=True)
    assert (found.documents, found.tokens, found.largest_id, found.token_type) == (4, 11, 9, "<u2")
    assert found.bin_sha256 == hashlib.sha256(bin_path(prefix).read_bytes()).hexdigest()
    assert found.idx_sha256 == hashlib.sha256(idx_path(prefix).read_bytes()).hexdigest()


@pytest.mark.parametrize(("block", "chunk"), [(1, 2), (2, 4), (3, 6), (7, 1 << 20)])
def test_blocks_and_chunks_of_any_size_find_the_same(
    block: int, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair_module, "BLOCK_DOCUMENTS", block)
    monkeypatch.setattr(pair_module, "CHUNK_BYTES", chunk)
    for name, (act, said) in DAMAGES.items():
        prefix = tmp_path / f"{len(name)}" / "a.b_00000_tokens"
        prefix.parent.mkdir(exist_ok=True)
        write_pair(prefix, DOCUMENTS)
        assert check_pair(prefix, RIGHT).problem is None
        act(prefix)
        found = check_pair(prefix, RIGHT).problem
        assert found is not None
        if name.startswith(("a token", "an end", "no end")):  # what of a wrong index is met first differs
            assert found == said


def test_a_pair_of_no_documents(tmp_path: Path) -> None:
    write_pair(tmp_path / "empty", [])
    found = check_pair(tmp_path / "empty", RIGHT, sha256=True)
    assert (found.problem, found.documents, found.tokens) == (None, 0, 0)
    assert found.bin_sha256 == hashlib.sha256(b"").hexdigest()


@settings(max_examples=300, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=12),
    change=st.sampled_from(["flip", "cut", "add", "zero"]),
    in_bin=st.booleans(),
    at=st.integers(0, 10_000),
    bit=st.integers(0, 7),
)
def test_a_random_change_is_found_or_is_another_sound_document(
    lengths: list[int], change: str, in_bin: bool, at: int, bit: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Without hashes only a token that becomes another token of the vocabulary is not seen; with hashes all is."""
    prefix = tmp_path_factory.mktemp("random") / "some"
    documents = [
        [1 + (number + place) % 7 for place in range(length - 1)] + [END] for number, length in enumerate(lengths)
    ]
    write_pair(prefix, documents)
    whole = check_pair(prefix, RIGHT, sha256=True)
    path = bin_path(prefix) if in_bin else idx_path(prefix)
    before = path.read_bytes()
    data = bytearray(before)
    at %= len(data)
    if change == "flip":
        data[at] ^= 1 << bit
    elif change == "zero":
        data[at] = 0
    elif change == "cut":
        del data[at:]
    else:
        data += bytes(at % 16 + 1)
    path.write_bytes(data)
    found = check_pair(prefix, RIGHT, sha256=True)
    if bytes(data) == before:
        assert found == whole
        return
    assert (found.bin_sha256, found.idx_sha256) != (whole.bin_sha256, whole.idx_sha256)
    if found.problem is None:
        assert in_bin
        assert len(data) == len(before)
        tokens, old = np.frombuffer(bytes(data), "<u2"), np.frombuffer(before, "<u2")
        assert (tokens == END).tolist() == (old == END).tolist()
        assert tokens.max() < VOCABULARY


# Against plan, records and what lies beside


def findings(report: Report) -> list[tuple[str, str]]:
    return [(finding.kind, finding.what) for finding in report.findings]


@pytest.fixture
def own(tmp_path: Path) -> DataFolder:
    return DataFolder(own_data_set(tmp_path))


def test_a_whole_data_set(own: DataFolder) -> None:
    for sha256 in (False, True):
        report = check_folder(own.path, sha256=sha256)
        assert findings(report) == []
        assert [shard.pair.documents for shard in report.shards if shard.pair] == [30, 20, 25]


def test_a_shard_that_is_not_made_yet(own: DataFolder) -> None:
    own.record(1).unlink()
    for end in (bin_path, idx_path):
        end(own.prefix("own", 1)).unlink()
    (found,) = check_folder(own.path).findings
    assert (found.kind, found.what) == ("missing", "`own_00001_tokens` is not made yet")
    assert found.remedy == "`moekit data tokenize own` makes it"


def test_a_pair_without_a_record(own: DataFolder) -> None:
    """As datatrove leaves it when it is killed, or as another plan's is left behind."""
    own.record(1).unlink()
    idx_path(own.prefix("own", 1)).unlink()
    what = "`own_00001_tokens` is there without a record: it was not finished, or is of another plan"
    assert findings(check_folder(own.path)) == [("unfinished", what)]


def test_an_index_that_lost_its_tokens(own: DataFolder) -> None:
    bin_path(own.prefix("own", 1)).unlink()
    assert findings(check_folder(own.path)) == [("missing", "`own_00001_tokens` lacks own_00001_tokens.bin")]


def test_a_record_that_cannot_be_read(own: DataFolder) -> None:
    own.record(1).write_text("{")
    (found,) = check_folder(own.path).findings
    assert found.kind == "damaged"
    assert found.what.startswith("the record of `own_00001_tokens` is not what this moekit writes")


def test_a_truncated_shard(own: DataFolder) -> None:
    size_bytes = bin_path(own.prefix("own", 1)).stat().st_size
    cut(bin_path(own.prefix("own", 1)), size_bytes - 2)
    what = f"`own_00001_tokens` has {size_bytes - 2:,} bytes of .bin, and its record says {size_bytes:,}"
    assert findings(check_folder(own.path)) == [("damaged", what)]


def swap(*paths: Path) -> None:
    first, second = (path.read_bytes() for path in paths)
    paths[0].write_bytes(second)
    paths[1].write_bytes(first)


def test_the_tokens_of_one_shard_beside_the_index_of_another(own: DataFolder) -> None:
    swap(*(bin_path(own.prefix("own", task)) for task in (0, 2)))
    found = findings(check_folder(own.path))
    assert [kind for kind, _ in found] == ["swapped", "swapped"]
    assert found[0][1].endswith(", as that of `own_00002_tokens`")
    assert found[1][1].endswith(", as that of `own_00000_tokens`")


def test_two_whole_shards_exchanged(own: DataFolder) -> None:
    for end in (bin_path, idx_path):
        swap(*(end(own.prefix("own", task)) for task in (0, 2)))
    assert [kind for kind, _ in findings(check_folder(own.path))] == ["swapped", "swapped"]


def test_shards_of_the_same_size_exchanged_are_told_by_their_hashes(tmp_path: Path) -> None:
    shards = [
        some_documents(1, 9),
        [[1 + token % 9 if token else END for token in one] for one in some_documents(1, 9)],
    ]
    own = DataFolder(write_data_set(tmp_path, a_plan(tasks=2), shards))
    for end in (bin_path, idx_path):
        swap(*(end(own.prefix("own", task)) for task in (0, 1)))
    assert findings(check_folder(own.path)) == []
    assert findings(check_folder(own.path, sha256=True)) == [
        ("swapped", "`own_00000_tokens` has the .bin of `own_00001_tokens`"),
        ("swapped", "`own_00001_tokens` has the .bin of `own_00000_tokens`"),
    ]


def test_a_token_changed_within_the_vocabulary_is_told_by_the_hash(own: DataFolder) -> None:
    tokens = bin_path(own.prefix("own", 1))
    put(tokens, 0, "<H", 1 + np.frombuffer(tokens.read_bytes(), "<u2")[0] % 9)
    assert findings(check_folder(own.path)) == []
    what = "`own_00001_tokens` has another .bin than was made, of the same size"
    assert findings(check_folder(own.path, sha256=True)) == [("damaged", what)]


def test_a_record_of_another_making(own: DataFolder) -> None:
    record = json.loads(own.record(1).read_text())
    own.record(1).write_text(json.dumps({**record, "documents": 21, "rows": 23}))
    ((kind, what),) = findings(check_folder(own.path))
    assert kind == "stale"
    assert "tokens in 20 documents, and its record says" in what


def test_files_of_no_shard_are_foreign(own: DataFolder) -> None:
    """As a run of fewer tasks leaves them behind, and a glob would list them."""
    write_pair(own.prefix("own", 3), DOCUMENTS)
    own.record(3).write_text("{}")
    assert findings(check_folder(own.path)) == [
        ("foreign", "`own_00003_tokens` is no shard of this data set, and has files here"),
        ("foreign", "`shards/00003.json` is the record of no shard of this plan"),
    ]


def test_another_tokenizer(own: DataFolder) -> None:
    file = own.path.parent.parent / "tokenizers" / "letters" / "tokenizer.json"
    file.write_bytes(TOKENIZER + b" ")
    what = f"tokenizer `letters` is not the one that these shards were made with: {file}"
    assert findings(check_folder(own.path)) == [("tokenizer", what)]


def test_rows_that_do_not_add_up(own: DataFolder) -> None:
    record = json.loads(own.record(1).read_text())
    own.record(1).write_text(json.dumps({**record, "rows": 99}))
    what = "`own_00001_tokens` was made of 99 rows, and 20 documents, 2 empty and 0 left out are 22"
    assert findings(check_folder(own.path)) == [("rows", what)]


def test_rows_of_a_parquet_source(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    files = []
    for number, rows in enumerate((22, 30)):  # the second lost 2 documents on the way
        file = tmp_path / f"{number}.parquet"
        parquet.write_table(arrow.table({"text": ["a"] * rows, "id": ["b"] * rows}), file)
        stat = file.stat()
        files.append(InputFile(str(file), stat.st_size, str(stat.st_mtime_ns)))
    plan = replace(a_plan(tasks=2), format="parquet", files=tuple(files))
    own = write_data_set(tmp_path / "root", plan, [some_documents(0, 20), some_documents(1, 26)])
    what = "`own_00001_tokens` was made of 28 rows, and its source has 30"
    assert findings(check_folder(own)) == [("rows", what)]
    Path(files[1].path).write_bytes(b"other")
    report = check_folder(own)
    assert findings(report) == []
    assert report.notes == (
        f"rows were not compared with the source, which is not here as it was read: {files[1].path}",
    )


def test_one_shard_is_checked_against_its_folder(own: DataFolder) -> None:
    cut(bin_path(own.prefix("own", 1)), 10)
    assert findings(check_folder(own.path, ["own_00000_tokens"])) == []
    assert len(findings(check_folder(own.path, ["own_00001_tokens"]))) == 1


def test_a_damaged_shard_is_removed_with_its_record(own: DataFolder) -> None:
    cut(bin_path(own.prefix("own", 1)), 10)
    prefix = own.prefix("own", 1)
    assert remove_damaged([check_folder(own.path)]) == [own.record(1), bin_path(prefix), idx_path(prefix)]
    assert findings(check_folder(own.path)) == [("missing", "`own_00001_tokens` is not made yet")]
    assert load_record(own, 0) is not None


def test_nothing_is_removed_while_somebody_tokenizes(own: DataFolder) -> None:
    cut(bin_path(own.prefix("own", 1)), 10)
    holds = (
        "import fcntl, sys, time; f = open(sys.argv[1], 'a'); fcntl.lockf(f, fcntl.LOCK_EX, 3, 0); print(flush=True)"
    )
    command = [sys.executable, "-c", f"{holds}; time.sleep(60)", str(own.lock)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout
        holder.stdout.readline()
        try:
            with pytest.raises(MoekitError, match="another moekit is tokenizing here"):
                remove_damaged([check_folder(own.path)])
        finally:
            holder.kill()
    assert own.record(1).exists()


def test_pairs_without_a_plan(prefix: Path) -> None:
    report = check_pairs([prefix], Expected())
    assert findings(report) == []
    assert report.notes == ("no plan says which ids are right; `--end-token` and `--vocab-size` would check them",)
    ((kind, what),) = findings(check_pairs([prefix], Expected(None, 9, None)))
    assert (kind, what) == (
        "damaged",
        "`a.b_00000_tokens` has a document, number 0, that does not end with the end token 9",
    )


# As a command


def moekit(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "moekit", "data", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_the_command(own: DataFolder) -> None:
    root = own.path.parent.parent
    done = moekit("check", "own", "--shared-root", root, "--sha256")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[:2] == [
        "SHARD             STATE  DOCUMENTS  TOKENS  LARGEST ID",
        "own_00000_tokens  whole         30     633         997",
    ]
    cut(bin_path(own.prefix("own", 1)), 10)
    done = moekit("check", "own", "--shared-root", root, "--json")
    assert done.returncode == 1
    (said,) = json.loads(done.stdout)
    assert not said["ok"]
    assert [shard["whole"] for shard in said["shards"]] == [True, False, True]
    assert said["findings"][0]["files"] == [
        str(path) for path in (own.record(1), bin_path(own.prefix("own", 1)), idx_path(own.prefix("own", 1)))
    ]
    done = moekit("check", own.path, "--remove-damaged")
    assert done.returncode == 1
    assert f"removed {own.record(1)}" in done.stderr
    done = moekit("check", "onw", "--shared-root", root)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: there is no shard, folder or data set `onw`\n    hint: did you mean `own`?\n"


def test_a_shard_made_anew_is_whole_again(own: DataFolder) -> None:
    cut(bin_path(own.prefix("own", 1)), 10)
    remove_damaged([check_folder(own.path)])
    documents = some_documents(1, 20)
    write_pair(own.prefix("own", 1), documents)
    write_record(own, a_plan(), 1, documents)
    assert findings(check_folder(own.path, sha256=True)) == []


# What Megatron does


@pytest.mark.megatron
@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("damage", DAMAGES)
def test_what_megatron_does(damage: str, mmap: bool, prefix: Path) -> None:
    """It opens most damaged pairs, and without a mapping reads what is not there."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    DAMAGES[damage][0](prefix)
    noticed = damage in NOTICED_AT_OPEN or (mmap and damage == ".bin of 0 bytes")
    if noticed:
        with pytest.raises((AssertionError, ValueError, OSError, KeyError, struct.error, RuntimeError)):
            IndexedDataset(str(prefix), multimodal=False, mmap=mmap)
        return
    dataset = IndexedDataset(str(prefix), multimodal=False, mmap=mmap)
    if "pointer" in damage:
        return  # reading it sleeps for a minute without a mapping
    if mmap and ("truncated" in damage or damage in RUNS_OVER):
        with pytest.raises(ValueError, match="buffer"):
            [dataset[number] for number in range(4)]
        return
    assert len([dataset[number] for number in range(4)]) == 4


@pytest.mark.megatron
def test_megatron_reads_whole_shards_as_we_do(own: DataFolder) -> None:
    done = moekit("check", own.path, "--megatron")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "note: Megatron read up to 100 documents of each of 3 whole shards, mapped and not" in done.stdout


@pytest.mark.megatron
def test_other_tokens_than_megatrons_are_told(own: DataFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    from moekit.data.checking import megatron_reads

    whole = megatron_reads.open_shard

    def wrong(prefix: Path) -> Any:
        shard = whole(prefix)
        shard.lengths[0] -= 1
        shard.lengths[1] += 1
        return shard

    monkeypatch.setattr(megatron_reads, "open_shard", wrong)
    assert list(megatron_reads.differences([str(own.prefix("own", 0))])) == [
        (str(own.prefix("own", 0)), "Megatron, mapped, reads other tokens in document 0")
    ]


def test_without_megatron_it_says_so(own: DataFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    from moekit.data.checking.megatron_reads import with_megatron

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MoekitError, match="`--megatron` needs megatron-core, and it is not installed"):
        with_megatron(check_folder(own.path))
