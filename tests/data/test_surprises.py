"""The eighteen ways in which datatrove's bookkeeping surprises: each is refused, repaired or reported by moekit.

datatrove marks a finished task by an empty file of its number in a log folder, shards its list of files when it runs,
leaves out what it cannot read with a warning, and its children outlive it.
"""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from small import END
from tokenized import (
    a_dataset,
    make_root,
    make_texts,
    moekit,
    plain,
    shard_bytes,
    visible,
    write_description,
    write_texts,
)

from moekit.data.making.documents import is_kept
from moekit.data.making.here import tokenize_here
from moekit.data.planning import differences, folder_of, make_plan, settle_plan
from moekit.data.shards import open_shard
from moekit.problems import MoekitError


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[str]]]:
    """A data set of four files in two shards, which no test changes: the folder of `root` and `text`, and the texts."""
    folder, texts = tmp_path_factory.mktemp("surprises"), make_texts()
    texts[0][0], texts[1][0], texts[2][0] = f"spells {END} and <|begin_of_text|>", " \n", END
    make_root(folder / "root")
    write_texts(folder / "text", texts)
    tokenize_here(a_dataset(folder / "text", tasks=2), folder / "root")
    return folder, texts


def refused(folder: Path, **fields: object) -> str:
    """What is said of the same folder's tokenization with other fields; nothing may be written."""
    before = visible(folder / "root")
    with pytest.raises(MoekitError) as raised:
        tokenize_here(a_dataset(folder / "text", **{"tasks": 2, **fields}), folder / "root")
    assert visible(folder / "root") == before
    return str(raised.value)


def test_01_other_settings_are_not_taken_for_done(made: tuple[Path, list[list[str]]], tmp_path: Path):
    folder, _ = made
    assert "`keep_fraction` was `null` and is `0.5`" in refused(folder, keep_fraction=0.5)
    assert "`end_of_document` was" in refused(folder, end_of_document="<|begin_of_text|>")
    write_texts(tmp_path / "other", [["a"], ["b"]])
    before = visible(folder / "root")
    with pytest.raises(MoekitError, match="2 input files are new"):
        tokenize_here(a_dataset(tmp_path / "other", tasks=2), folder / "root")
    assert visible(folder / "root") == before


def test_02_a_record_without_its_files_is_not_taken_for_done(tmp_path: Path):
    root, texts = make_root(tmp_path / "root"), make_texts(files=1)
    write_texts(tmp_path / "text", texts)
    for _ in range(2):
        done = tokenize_here(a_dataset(tmp_path / "text"), root)
        assert done.made == 1
        assert shard_bytes(done.folder, "some", 0) == plain(root, texts[0])
        for file in done.folder.path.glob("*_tokens.*"):
            file.unlink()


@pytest.mark.parametrize("tasks", [1, 4])
def test_03_another_number_of_tasks_is_refused(made: tuple[Path, list[list[str]]], tasks: int):
    assert f"`tasks` was `2` and is `{tasks}`" in refused(made[0], tasks=tasks)


def test_04_shards_of_unknown_origin_are_refused(tmp_path: Path):
    root = make_root(tmp_path / "root")
    write_texts(tmp_path / "text", make_texts(files=1))
    stale = root / "data" / "some" / "some_00003_tokens.bin"
    stale.parent.mkdir(parents=True)
    stale.write_bytes(b"stale")
    with pytest.raises(MoekitError) as raised:
        tokenize_here(a_dataset(tmp_path / "text"), root)
    assert "the folder has no `plan.json`, but holds `some_00003_tokens.bin`" in str(raised.value)
    assert visible(root) == {"data/some/some_00003_tokens.bin": b"stale"}


def test_05_a_file_that_was_added_is_refused(made: tuple[Path, list[list[str]]]):
    added = made[0] / "text" / "0005.jsonl"
    added.write_text('{"text": "new"}\n')
    told = refused(made[0])
    added.unlink()
    assert f"1 input file is new: `{added}`" in told


def test_06_a_limit_counts_for_each_file_and_says_so(made: tuple[Path, list[list[str]]], tmp_path: Path):
    make_root(tmp_path / "root")
    done = tokenize_here(a_dataset(made[0] / "text", tasks=2), tmp_path / "root", limit=2)
    assert [record.documents for record in done.records] == [4, 4]
    assert "N documents of each file" in " ".join(moekit(tmp_path, tmp_path, "--help").stdout.split())


def test_07_nothing_to_write_is_an_error(tmp_path: Path):
    root = make_root(tmp_path / "root")
    write_texts(tmp_path / "text", make_texts(files=2))
    with pytest.raises(MoekitError, match="has 3 tasks for 2 input files"):
        tokenize_here(a_dataset(tmp_path / "text", tasks=3), root)
    with pytest.raises(MoekitError, match="no line has the key `body`; the first has `id`, `text`, `score`"):
        tokenize_here(a_dataset(tmp_path / "text", text_key="body"), root)
    write_texts(tmp_path / "bare", [["", None]])
    with pytest.raises(
        MoekitError, match="shard 0 would hold no document: of 2 rows, 2 have no text and 0 are not kept"
    ):
        tokenize_here(a_dataset(tmp_path / "bare", name="bare"), root)
    assert not [name for name in visible(root) if ".parts" not in name]


def test_08_rows_without_text_are_counted_and_white_space_is_text(tmp_path: Path):
    root = make_root(tmp_path / "root")
    write_texts(tmp_path / "text", [["one", "", None, " \n", "two"]], "parquet")
    done = tokenize_here(a_dataset(tmp_path / "text"), root)
    assert (done.records[0].rows, done.records[0].empty, done.records[0].documents) == (5, 2, 3)
    assert shard_bytes(done.folder, "some", 0) == plain(root, ["one", " \n", "two"])


def test_09_a_text_that_spells_a_special_token_is_text(made: tuple[Path, list[list[str]]]):
    folder, texts = made
    root = folder / "root"
    shard = open_shard(folder_of(root, "some").prefix("some", 0))
    plan = make_plan(a_dataset(folder / "text", tasks=2), root)
    tokens = shard.read()
    assert (tokens == plan.end_of_document_id).sum() == shard.documents == len(texts[0]) + len(texts[2])
    assert shard_bytes(folder_of(root, "some"), "some", 0) == plain(root, [*texts[0], *texts[2]])


@pytest.mark.parametrize("end", ["", "<|endoftext|>"])
def test_10_an_end_token_that_is_none_is_refused(made: tuple[Path, list[list[str]]], end: str):
    assert "end" in refused(made[0], end_of_document=end)


def test_11_what_a_failure_leaves_has_no_shards_name(tmp_path: Path):
    root = make_root(tmp_path / "root")
    paths = write_texts(tmp_path / "text", make_texts(files=2))
    paths[1].write_text('{"text": "cut\n')
    with pytest.raises(MoekitError, match=r"001\.jsonl:1: the line is no JSON"):
        tokenize_here(a_dataset(tmp_path / "text"), root)
    assert all(".parts/" in name for name in visible(root))
    assert not (root / "data" / "some" / "shards").exists()


def test_12_no_worker_outlives_the_command():
    """test_tokenizing_killed.py kills it; here, a worker whose parent is not the one that started it does nothing."""
    done = subprocess.run(
        [sys.executable, "-m", "moekit.data.making.worker", "/nowhere", "1"],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_13_a_rerun_keeps_finished_files(tmp_path: Path):
    """Tested with what it reads again in test_tokenizing.py; here, that datatrove's redoing from zero is not ours."""
    root = make_root(tmp_path / "root")
    paths = write_texts(tmp_path / "text", make_texts(files=2))
    good = paths[1].read_bytes()
    paths[1].write_bytes(b"?" * len(good))
    stat = paths[1].stat()
    with pytest.raises(MoekitError):
        tokenize_here(a_dataset(tmp_path / "text"), root)
    part = root / "data" / "some" / ".parts" / "00000" / "00000.bin"
    written = part.stat().st_mtime_ns
    with pytest.raises(MoekitError):
        tokenize_here(a_dataset(tmp_path / "text"), root)
    assert part.stat().st_mtime_ns == written
    assert stat.st_mtime_ns == paths[1].stat().st_mtime_ns


def test_14_what_is_kept_is_not_the_same_rows_of_each_file(tmp_path: Path):
    rows = [[is_kept(f"{file}-{row}", 0.3) for row in range(200)] for file in range(6)]
    assert len({tuple(kept) for kept in rows}) == 6
    assert 240 < sum(map(sum, rows)) < 480
    assert rows == [[is_kept(f"{file}-{row}", 0.3) for row in range(200)] for file in range(6)]


def test_15_tokens_are_counted_by_this_tokenizer(tmp_path: Path):
    root = make_root(tmp_path / "root")
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "some.jsonl").write_text(json.dumps({"text": "experts", "token_count": 12345, "metadata": 5}) + "\n")
    done = tokenize_here(a_dataset(folder), root)
    assert done.records[0].tokens == len(plain(root, ["experts"])[0]) // 2


def test_16_what_is_put_down_lies_with_the_shards_and_nothing_in_the_working_directory(
    made: tuple[Path, list[list[str]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    make_root(tmp_path / "root")
    description = write_description(tmp_path / "some.yaml", made[0] / "text", tasks=2)
    assert moekit(description, tmp_path / "root").returncode == 0
    assert {path.name for path in tmp_path.iterdir()} == {"root", "some.yaml"}
    assert {path.name for path in (tmp_path / "root" / "data" / "some").iterdir()} == {
        *(f"some_0000{task}_tokens.{end}" for task in (0, 1) for end in ("bin", "idx")),
        *("plan.json", "shards", "logs", ".lock"),
    }


def test_17_what_matches_nothing_leaves_nothing(tmp_path: Path):
    root = make_root(tmp_path / "root")
    for source in (tmp_path / "none", tmp_path / "none" / "*.jsonl"):
        with pytest.raises(MoekitError, match="none"):
            tokenize_here(a_dataset(source), root)
    (tmp_path / "empty").mkdir()
    with pytest.raises(MoekitError, match="no parquet or jsonl file is there"):
        tokenize_here(a_dataset(tmp_path / "empty"), root)
    assert not (root / "data").exists()


def test_18_no_other_column_matters(tmp_path: Path):
    """What is read of a parquet file is in test_documents.py; that a plan does not hold more than it should, here."""
    root = make_root(tmp_path / "root")
    write_texts(tmp_path / "text", [["one"]], "parquet")
    plan = make_plan(a_dataset(tmp_path / "text"), root)
    settle_plan(folder_of(root, "some"), plan)
    assert differences(plan, replace(plan)) == []
    assert json.loads(folder_of(root, "some").plan.read_text())["text_key"] == "text"
