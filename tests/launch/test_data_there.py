"""A run is launched on data that is there, whole, and of its tokenizer; and it is said how often it is read."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from moekit.data.make_manifest import make_blend, make_manifest
from moekit.data.plan import DataFolder
from moekit.data.shards import bin_path
from moekit.launch import data_there
from moekit.launch.run_files import run_arguments
from moekit.megatron.flags import argv
from moekit.problems import format_problem
from moekit.recipe.load import Loaded

sys.path.append(str(Path(__file__).parents[1] / "data"))
from made_shards import own_data_set

Recipe = Callable[..., Loaded]
OWN = """
data: {name: own, tokenizer: letters, split: '90,10,0', shards: null}
model: {seq_length: 8}
train: {iters: 10, samples: null, global_batch_size: 16, rampup_batch_size: null}
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    own_data_set(tmp_path)
    make_manifest(tmp_path / "data" / "own")
    return tmp_path


def said(loaded: Loaded, root: Path) -> list[str]:
    found = data_there.problems(loaded, root)
    return [format_problem(one).partition("changed.yaml:")[2].partition(": ")[2] or one.what for one in found]


def with_data(recipe_of: Recipe, data: str) -> Loaded:
    return recipe_of(OWN.replace("split: '90,10,0'", data))


def test_data_that_is_there(recipe_of: Recipe, root: Path) -> None:
    loaded = recipe_of(OWN)
    assert said(loaded, root) == []
    assert data_there.trained_tokens(loaded) == 1280
    assert data_there.epochs(loaded, root) == {"own": pytest.approx(1280 / 1616 / 0.9)}
    assert data_there.said_of_epochs(loaded, root) == "1,280 tokens of training are 0.88 epochs of `own`"
    long = recipe_of(OWN.replace("iters: 10", "iters: 10_000_000"))
    assert data_there.said_of_epochs(long, root) == "1.28 billion tokens of training are 880,088 epochs of `own`"


def test_no_data_set(recipe_of: Recipe, tmp_path: Path) -> None:
    assert said(recipe_of(OWN), tmp_path) == [
        f"there is no tokenizer `letters`: {tmp_path}/tokenizers/letters\n"
        "    hint: put its files there, or `moekit data tokenizer DATASET` fetches that of a data set",
        f"there is no data set `own`: {tmp_path}/data/own\n"
        "    hint: `moekit data tokenize own` makes it; or put its shards there, and their list `data-args.txt`",
    ]
    assert data_there.said_of_epochs(recipe_of(OWN), tmp_path) is None


def test_no_manifest_yet(recipe_of: Recipe, tmp_path: Path) -> None:
    folder = own_data_set(tmp_path)
    assert said(recipe_of(OWN), tmp_path) == [
        f"data set `own` has no manifest: {folder}\n"
        "    hint: `moekit data tokenize own` makes its shards, `moekit data manifest own` lists them"
    ]


def test_a_shard_that_is_gone_or_cut(recipe_of: Recipe, root: Path) -> None:
    folder = DataFolder(root / "data" / "own")
    tokens = bin_path(folder.prefix("own", 1))
    tokens.write_bytes(tokens.read_bytes()[:100])
    bin_path(folder.prefix("own", 2)).unlink()
    assert said(recipe_of(OWN), root) == [
        f"data set `own` has 100 bytes in {tokens}, and its manifest says 912, and 1 more\n"
        "    hint: `moekit data check own` says what to make again; then `moekit data manifest own`"
    ]


def test_a_folder_that_was_moved(recipe_of: Recipe, root: Path, tmp_path: Path) -> None:
    (root / "elsewhere").mkdir()
    for name in ("data", "tokenizers"):
        (root / name).rename(root / "elsewhere" / name)
    assert said(recipe_of(OWN), root / "elsewhere") == [
        "data set `own`: `data-args.txt` is not the list of its manifest\n"
        "    hint: `moekit data manifest own` writes it again"
    ]


def test_another_tokenizer(recipe_of: Recipe, root: Path) -> None:
    file = root / "tokenizers" / "letters" / "tokenizer.json"
    file.write_text("{}")
    (what,) = said(recipe_of(OWN), root)
    assert what.startswith(
        f"data set `own` was made with another tokenizer than the `letters` that is in {file.parent}\n"
        "    hint: it was `letters`, of sha256 "
    )
    assert what.endswith("...; `moekit data tokenizer own` fetches it")
    file.unlink()
    (what,) = said(recipe_of(OWN), root)
    assert what.startswith("warning: tokenizer `letters` has no `tokenizer.json`")


def test_fewer_ids_than_the_data_has(recipe_of: Recipe, root: Path) -> None:
    (what,) = said(with_data(recipe_of, "split: '90,10,0', vocab_size: 999"), root)
    assert what.startswith("`data.vocab_size: 999` is less than the 1,000 token ids of the data")


def test_a_manifest_that_is_damaged(recipe_of: Recipe, root: Path) -> None:
    (root / "data" / "own" / "manifest.json").write_text("{")
    assert said(recipe_of(OWN), root) == ["is no manifest of this moekit, or damaged"]


def test_data_put_there_by_hand_is_launched_with_a_warning(recipe_of: Recipe, root: Path) -> None:
    folder = DataFolder(root / "data" / "own")
    folder.plan.unlink()
    folder.manifest.unlink()
    assert said(recipe_of(OWN), root) == [
        f"warning: data set `own` has no manifest, so nothing says that its shards are whole: {folder.path}\n"
        f"    hint: `moekit data check {folder.path}` looks at them"
    ]


def test_shards_by_name(recipe_of: Recipe, root: Path) -> None:
    shards = "split: '90,10,0', shards: [own_00000_tokens, own_00002_tokens]"
    loaded = recipe_of(OWN.replace("split: '90,10,0', shards: null", shards))
    (what,) = said(loaded, root)
    assert what.startswith("training reads the 2 shards of `data.shards` 1.2 times, and Megatron reads shards without")
    weighted = shards.replace("[own_00000", "['3', own_00000").replace(" own_00002", " '1', own_00002")
    loaded = recipe_of(OWN.replace("split: '90,10,0', shards: null", weighted))
    assert said(loaded, root) == []
    words = argv(run_arguments(loaded.recipe, "run", root, resume=False))
    at = words.index("--data-path")
    own = root / "data" / "own"
    assert words[at + 1 : at + 5] == ["3", f"{own}/own_00000_tokens", "1", f"{own}/own_00002_tokens"]


def test_too_many_epochs_are_a_warning(recipe_of: Recipe, root: Path) -> None:
    (what,) = said(recipe_of(OWN.replace("iters: 10", "iters: 100")), root)
    assert what.startswith("warning: training reads `own` 8.8 times; from 4 epochs on, more teach ever less")


def test_a_split_that_leaves_a_shard_nothing(recipe_of: Recipe, root: Path) -> None:
    (what,) = said(with_data(recipe_of, "split: '99,1,0'"), root)
    assert what.startswith("`data.split: 99,1,0` gives validation none of the 30 documents of own_00000_tokens")


def test_shards_held_out(recipe_of: Recipe, root: Path) -> None:
    loaded = with_data(recipe_of, "split: null, per_split: true")
    assert said(loaded, root) == [
        "data set `own` holds no shards out, and `data.per_split` reads those\n"
        "    hint: `moekit data manifest own --held-out 1`"
    ]
    make_manifest(root / "data" / "own", held_out=1)
    assert said(loaded, root) == []
    assert data_there.epochs(loaded, root) == {"own": pytest.approx(1280 / 1089)}
    words = argv(run_arguments(loaded.recipe, "run", root, resume=False))
    assert words[words.index("--per-split-data-args-path") + 1] == str(root / "data" / "own" / "data-args.json")
    assert "--data-args-path" not in words


def test_a_blend(recipe_of: Recipe, root: Path) -> None:
    own_data_set(root, "code", (10, 8))
    make_manifest(root / "data" / "code")
    make_blend(root, "mixed", ["own:3", "code:1"])
    loaded = recipe_of(OWN.replace("name: own", "name: mixed"))
    assert said(loaded, root) == []
    assert data_there.epochs(loaded, root).keys() == {"own", "code"}
    bin_path(DataFolder(root / "data" / "code").prefix("code", 0)).unlink()
    (what,) = said(loaded, root)
    assert what.endswith("`moekit data check own code` says what to make again; then `moekit data manifest mixed`")
