"""Only whole, checked shards are listed; and the real Megatron reads the lists."""

import json
import subprocess
import sys
from argparse import Namespace
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from made_shards import END, VOCABULARY, a_plan, own_data_set, some_documents, write_data_set, write_pair

from moekit.data.checking.folder import check_folder
from moekit.data.make_manifest import make_blend, make_manifest
from moekit.data.manifest import fingerprint, not_as_listed, read_manifest
from moekit.data.plan import DataFolder
from moekit.data.shards import bin_path, idx_path
from moekit.problems import MoekitError


def refused(folder: Path, held_out: int = 0) -> list[str]:
    with pytest.raises(MoekitError) as refusal:
        make_manifest(folder, held_out)
    assert not DataFolder(folder).manifest.exists()
    assert not DataFolder(folder).data_args.exists()
    return [problem.what for problem in refusal.value.problems]


def test_a_manifest_says_what_training_reads(tmp_path: Path) -> None:
    folder = own_data_set(tmp_path)
    made, _ = make_manifest(folder)
    assert read_manifest(folder) == made
    assert (made.documents, made.tokens, made.vocab_size) == (75, 1616, VOCABULARY)
    assert made.fingerprint == fingerprint(a_plan())
    assert made.versions["datatrove"] == "0.10.1"
    assert [one.prefix for one in made.shards] == [f"own_0000{task}_tokens" for task in range(3)]
    prefix = f"{folder}/own_0000"
    assert (folder / "data-args.txt").read_text() == (
        f"633 {prefix}0_tokens\n456 {prefix}1_tokens\n527 {prefix}2_tokens\n"
    )
    assert sorted(path.name for path in folder.glob("*.*") if path.suffix not in (".bin", ".idx")) == [
        "data-args.txt",
        "manifest.json",
        "plan.json",
    ]
    assert check_folder(folder, sha256=True).findings == ()


def test_one_shard_needs_no_weight(tmp_path: Path) -> None:
    folder = own_data_set(tmp_path, counts=(9,))
    make_manifest(folder)
    assert (folder / "data-args.txt").read_text() == f"{folder}/own_00000_tokens\n"


def test_a_plan_tells_itself_from_others() -> None:
    assert fingerprint(a_plan()) != fingerprint(replace(a_plan(), keep_fraction=0.5))


def test_an_incomplete_data_set_is_not_listed(tmp_path: Path) -> None:
    folder = DataFolder(own_data_set(tmp_path))
    folder.record(1).unlink()
    bin_path(folder.prefix("own", 2)).unlink()
    assert refused(folder.path) == [
        "`own_00001_tokens` is there without a record: it was not finished, or is of another plan",
        "`own_00002_tokens` lacks own_00002_tokens.bin",
    ]


def test_a_token_changed_since_it_was_written_is_not_listed(tmp_path: Path) -> None:
    folder = DataFolder(own_data_set(tmp_path))
    path = bin_path(folder.prefix("own", 1))
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)
    assert refused(folder.path) == ["`own_00001_tokens` has another .bin than was made, of the same size"]


def test_many_that_are_not_whole_are_counted(tmp_path: Path) -> None:
    folder = DataFolder(own_data_set(tmp_path, counts=[3] * 9))
    for task in range(8):
        folder.record(task).unlink()
    said = refused(folder.path)
    assert (len(said), said[-1]) == (6, "and 3 more shards are not whole")


def test_foreign_files_are_never_listed(tmp_path: Path) -> None:
    folder = DataFolder(own_data_set(tmp_path))
    write_pair(folder.prefix("own", 7), [[1, END]])
    made, report = make_manifest(folder.path)
    assert len(made.shards) == 3
    assert [finding.kind for finding in report.findings] == ["foreign"]


def test_a_sample_is_not_listed(tmp_path: Path) -> None:
    folder = write_data_set(tmp_path, a_plan(tasks=1, limit=10), [some_documents(0, 5)])
    assert folder.name == "own-sample"
    assert refused(folder) == ["this is a sample, of 10 documents a file, and no data to train on"]


def test_another_tokenizer_is_not_listed(tmp_path: Path) -> None:
    folder = own_data_set(tmp_path)
    (tmp_path / "tokenizers" / "letters" / "tokenizer.json").write_text("{}")
    (what,) = refused(folder)
    assert what.startswith("tokenizer `letters` is not the one that these shards were made with")


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    assert refused(tmp_path) == [f"there is no data set to list: {tmp_path}/plan.json is missing"]


@pytest.mark.parametrize("name", ["with space", "tab\there", "new\nline", "nbsp\u00a0here"])
def test_a_path_that_megatron_would_split(name: str, tmp_path: Path) -> None:
    folder = own_data_set(tmp_path / name)
    (what,) = refused(folder)
    assert "the path has a space or a character that cannot be printed" in what


def test_empty_shards_are_left_out(tmp_path: Path) -> None:
    folder = own_data_set(tmp_path, counts=(0, 5, 0))
    made, _ = make_manifest(folder)
    assert made.empty == ("own_00000_tokens", "own_00002_tokens")
    assert (folder / "data-args.txt").read_text() == f"{folder}/own_00001_tokens\n"


def test_a_data_set_without_documents(tmp_path: Path) -> None:
    folder = own_data_set(tmp_path, counts=(0, 0))
    assert refused(folder) == ["data set `own` has no documents at all, so there is nothing to list"]


def test_held_out_shards(tmp_path: Path) -> None:
    folder = own_data_set(tmp_path)
    made, _ = make_manifest(folder, held_out=2)
    prefix = f"{folder}/own_0000"
    assert json.loads((folder / "data-args.json").read_text()) == {
        "train": [f"{prefix}0_tokens"],
        "valid": ["456", f"{prefix}1_tokens", "527", f"{prefix}2_tokens"],
        "test": None,
    }
    assert (folder / "data-args.txt").read_text() == f"{prefix}0_tokens\n"
    assert (made.tokens, made.documents, len(made.held_out)) == (633, 30, 2)
    make_manifest(folder)
    assert not (folder / "data-args.json").exists()


@pytest.mark.parametrize("held_out", [3, 4])
def test_all_shards_held_out(held_out: int, tmp_path: Path) -> None:
    (what,) = refused(own_data_set(tmp_path), held_out)
    assert what == f"`--held-out {held_out}` leaves none of the 3 shards with documents to train on"


def test_a_manifest_notices_what_changed_behind_it(tmp_path: Path) -> None:
    folder = DataFolder(own_data_set(tmp_path))
    made, _ = make_manifest(folder.path)
    assert [*not_as_listed(folder.path, made)] == []
    idx_path(folder.prefix("own", 0)).unlink()
    with bin_path(folder.prefix("own", 1)).open("ab") as file:
        file.write(b"12")
    assert [*not_as_listed(folder.path, made)] == [
        f"has no {folder.path}/own_00000_tokens.idx",
        f"has 914 bytes in {folder.path}/own_00001_tokens.bin, and its manifest says 912",
    ]


def test_a_manifest_of_another_plan_is_told(tmp_path: Path) -> None:
    folder = DataFolder(own_data_set(tmp_path))
    make_manifest(folder.path)
    folder.plan.write_text(json.dumps(asdict(replace(a_plan(), keep_fraction=0.5))))
    (found,) = check_folder(folder.path).findings
    assert (found.kind, found.what) == ("manifest", "`manifest.json` is of another plan")


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"shards": 3}', "null"])
def test_a_manifest_that_cannot_be_read(text: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(MoekitError, match="is no manifest of this moekit, or damaged"):
        read_manifest(tmp_path)


# Blends


def two(root: Path, held_out: int = 0) -> None:
    for name, counts in (("web", (30, 20)), ("code", (10, 5))):
        make_manifest(own_data_set(root, name, counts), held_out)


def test_a_blend_reads_each_data_set_by_its_weight(tmp_path: Path) -> None:
    two(tmp_path)
    made = make_blend(tmp_path, "mixed", ["web:3", "code:1"])
    assert [(part.name, part.weight) for part in made.parts] == [("web", 0.75), ("code", 0.25)]
    shares = [sum(one.weight for one in made.shards if f"/{name}/" in one.prefix) for name in ("web", "code")]
    assert shares == pytest.approx([0.75, 0.25])
    lines = [line.split() for line in (tmp_path / "data" / "mixed" / "data-args.txt").read_text().splitlines()]
    assert [prefix for _, prefix in lines] == [
        str(tmp_path / "data" / name / f"{name}_0000{task}_tokens") for name in ("web", "code") for task in (0, 1)
    ]
    by_tokens = [one.weight / one.tokens for one in made.shards[:2]]
    assert by_tokens[0] == pytest.approx(by_tokens[1])
    assert check_folder(tmp_path / "data" / "mixed", sha256=True).findings == ()
    assert [*not_as_listed(tmp_path / "data" / "mixed", made)] == []


def test_a_blend_holds_out_what_its_parts_do(tmp_path: Path) -> None:
    two(tmp_path, held_out=1)
    make_blend(tmp_path, "mixed", ["web:3", "code:1"])
    said = json.loads((tmp_path / "data" / "mixed" / "data-args.json").read_text())
    prefixes = [str(tmp_path / "data" / name / f"{name}_00001_tokens") for name in ("web", "code")]
    assert said["valid"] == ["0.75", prefixes[0], "0.25", prefixes[1]]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["web"], "`--of web` is not a data set and its weight"),
        (["web:0"], "`--of web:0` is not a data set and its weight"),
        (["web:inf"], "`--of web:inf` is not a data set and its weight"),
        (["web:nan"], "`--of web:nan` is not a data set and its weight"),
        (["web:1", "web:2"], "a data set is named twice in `--of`"),
        (["none:1"], "data set `none` has no manifest"),
        (["blend:1"], "`blend` is a blend itself"),
        (["other:1", "web:1"], "`web` was tokenized with another tokenizer than `other`"),
    ],
)
def test_blends_that_are_refused(given: list[str], said: str, tmp_path: Path) -> None:
    two(tmp_path)
    make_blend(tmp_path, "blend", ["web:1", "code:1"])
    other = replace(a_plan("other", 1), tokenizer="other", tokenizer_sha256="0" * 64)
    make_manifest_of(tmp_path, other)
    with pytest.raises(MoekitError, match=said.replace("(", r"\(")):
        make_blend(tmp_path, "mixed", given)
    assert not (tmp_path / "data" / "mixed").exists()


def make_manifest_of(root: Path, plan: Any) -> None:
    folder = write_data_set(root, plan, [some_documents(0, 5)])
    (root / "tokenizers" / plan.tokenizer / "tokenizer.json").unlink()
    make_manifest(folder)


def test_a_blend_is_not_called_like_a_data_set(tmp_path: Path) -> None:
    two(tmp_path)
    with pytest.raises(MoekitError, match="`web` is a data set of its own"):
        make_blend(tmp_path, "web", ["code:1"])
    (tmp_path / "data" / "hand").mkdir()
    (tmp_path / "data" / "hand" / "data-args.txt").write_text("/mine\n")
    with pytest.raises(MoekitError, match="`hand` has a list that moekit did not write"):
        make_blend(tmp_path, "hand", ["code:1"])


# As a command


def moekit(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "moekit", "data", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_the_command(tmp_path: Path) -> None:
    folder = own_data_set(tmp_path)
    done = moekit("manifest", "own", "--shared-root", tmp_path, "--held-out", 1)
    assert (done.returncode, done.stdout) == (
        0,
        "own: 1,089 tokens in 50 documents, 2 shards\n"
        "  held out    527 tokens in 1 shards\n"
        f"  written     {folder}/manifest.json\n"
        "  next        `data: {name: own, per_split: true}` in a recipe\n",
    )
    bin_path(DataFolder(folder).prefix("own", 1)).unlink()
    done = moekit("manifest", "own", "--shared-root", tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"{folder}: `own_00001_tokens` lacks own_00001_tokens.bin\n    hint: `moekit data")


def test_two_at_once(tmp_path: Path) -> None:
    folder = own_data_set(tmp_path)
    command = [sys.executable, "-m", "moekit", "data", "manifest", "own", "--shared-root", str(tmp_path)]
    several = [subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) for _ in range(3)]
    assert [one.wait(120) for one in several] == [0, 0, 0]
    assert check_folder(folder, sha256=True).findings == ()
    assert not [*folder.glob(".*manifest*"), *folder.glob(".data-args*")]


# The real Megatron


@pytest.mark.megatron
def test_megatrons_parser_and_blend_reader_read_the_lists(tmp_path: Path) -> None:
    from megatron.training.utils import get_blend_and_blend_per_split

    two(tmp_path, held_out=1)
    made = make_blend(tmp_path, "mixed", ["web:0.7", "code:0.3"])
    folder = tmp_path / "data" / "mixed"
    none = dict.fromkeys(("data_path", "train_data_path", "valid_data_path", "test_data_path"))
    both = {"data_args_path": None, "per_split_data_args_path": None}
    blend, per_split = get_blend_and_blend_per_split(
        Namespace(**none, **{**both, "data_args_path": str(folder / "data-args.txt")})
    )
    paths = [str(tmp_path / f"data/{name}/{name}_00000_tokens") for name in ("web", "code")]
    assert (blend, per_split) == ((paths, [one.weight for one in made.shards]), None)
    blend, (train, valid, test) = get_blend_and_blend_per_split(
        Namespace(**none, **{**both, "per_split_data_args_path": str(folder / "data-args.json")})
    )
    assert blend is None
    assert (train, test) == ((paths, [0.7, 0.3]), None)
    assert valid == ([path.replace("00000", "00001") for path in paths], [0.7, 0.3])


def samples(folder: Path, weighted: bool, sizes: list[int]) -> list[int | None]:
    """How many samples Megatron builds of a data set for as many as are wanted."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.utils import get_blend_from_list

    words = (folder / "data-args.txt").read_text().split()
    tokenizer = Namespace(eod=END, vocab_size=VOCABULARY, unique_identifiers={"class": "letters"}, pad=END)
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=8,
        blend=get_blend_from_list(words if weighted else words[1::2]),
        split="90,10,0",
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    built = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()
    return [None if one is None else len(one) for one in built]


@pytest.mark.megatron
def test_several_shards_can_be_read_more_than_once(tmp_path: Path) -> None:
    """Without weights Megatron has one epoch, and a longer run ends for want of samples."""
    folder = own_data_set(tmp_path)
    make_manifest(folder)
    wanted = 3 * 1616 // 8
    once = samples(folder, False, [wanted, 10, 0])[0]
    often = samples(folder, True, [wanted, 10, 0])[0]
    assert once is not None
    assert often is not None
    assert once < wanted / 2
    assert often >= wanted
