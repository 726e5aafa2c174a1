from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_look import write_pair
from typer.testing import CliRunner

from moekit.cli import app
from moekit.data.hash_table.files import count_tokens, read_record, table_file
from moekit.data.hash_table.table import (
    METHODS,
    at_random,
    greedy,
    in_turns,
    least_max_vio,
    load_of,
    make_table,
    max_vio,
    problem_of,
)
from moekit.problems import MoekitError


def zipf(vocab_size: int, tokens: float, exponent: float = 1.0) -> np.ndarray:
    """Frequencies as words have them, in no order of ids."""
    weights = 1 / np.arange(1, vocab_size + 1) ** exponent
    counts = (tokens * weights / weights.sum()).astype(np.int64)
    np.random.default_rng(3).shuffle(counts)
    return counts


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, int, int]:
    experts = draw(st.integers(1, 24))
    topk = draw(st.integers(1, experts))
    counts = draw(st.lists(st.integers(0, 10**6) | st.integers(0, 3), min_size=1, max_size=120))
    return np.array(counts, np.int64), experts, topk


@settings(max_examples=150, deadline=None)
@given(cases())
def test_greedy_is_even_up_to_the_most_frequent_token(case: tuple[np.ndarray, int, int]) -> None:
    counts, experts, topk = case
    table = greedy(counts, experts, topk)
    assert table.shape == (len(counts), topk)
    assert problem_of(table, experts) is None  # in range, and a row's all different
    load = load_of(table, counts, experts)
    assert load.sum() == counts.sum() * topk
    assert load.max() - load.min() <= counts.max()
    assert max_vio(load) >= least_max_vio(counts, experts, topk) - 1e-9


@settings(max_examples=60, deadline=None)
@given(cases(), st.sampled_from(METHODS))
def test_each_method_makes_a_table_and_the_same_one_again(case: tuple[np.ndarray, int, int], method: str) -> None:
    counts, experts, topk = case
    table = make_table(method, counts, experts, topk)
    assert (table.shape, table.dtype) == ((len(counts), topk), np.int32)
    assert problem_of(table, experts) is None
    assert np.array_equal(table, make_table(method, counts, experts, topk))


def test_ids_that_never_occur_are_dealt_evenly() -> None:
    counts = np.zeros(1000, np.int64)
    counts[7] = 10**6
    table = greedy(counts, 16, 2)
    rows = np.bincount(table.ravel(), minlength=16)
    assert rows.max() - rows.min() <= 1


def test_greedy_is_more_even_than_the_others_and_nearly_as_even_as_can_be() -> None:
    counts = zipf(32_000, 1e9)
    vio = {method: max_vio(load_of(make_table(method, counts, 64, 6), counts, 64)) for method in METHODS}
    best = least_max_vio(counts, 64, 6)
    assert vio["greedy"] < best + 1e-3
    assert best + 0.01 < min(vio["random"], vio["round-robin"])


def test_a_large_table_takes_seconds() -> None:
    counts = zipf(129_280, 1e10, 1.1)
    began = time.process_time()
    table = greedy(counts, 256, 8)
    assert time.process_time() - began < 15  # 1 s where this was written
    assert problem_of(table, 256) is None


def test_round_robin_is_megatrons_placeholder() -> None:
    torch = pytest.importorskip("torch")
    ids, choices = torch.arange(100), torch.arange(3)
    assert np.array_equal(in_turns(100, 7, 3), ((ids[:, None] + choices) % 7).to(torch.int32).numpy())


def test_random_tables_use_every_expert_alike_and_differ_by_seed() -> None:
    table = at_random(20_000, 32, 4, seed=0)
    rows = np.bincount(table.ravel(), minlength=32)
    assert rows.min() > 0.9 * rows.mean()
    assert not np.array_equal(table, at_random(20_000, 32, 4, seed=1))


def test_load_is_counted_token_by_token() -> None:
    table = np.array([[0, 1], [1, 2], [0, 2]], np.int32)
    assert load_of(table, np.array([5, 1, 0]), 4).tolist() == [5, 6, 1, 0]
    assert max_vio(np.array([5, 6, 1, 0])) == 1.0
    assert load_of(table, np.array([5]), 4).tolist() == [5, 5, 0, 0]  # the data's vocabulary is the smaller one


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (np.array([1, 2]), "has the shape (2,)"),
        (np.array([[0.5]]), "float64"),
        (np.zeros((0, 2), int), "is empty"),
        (np.array([[0, 4]]), "sends tokens to expert 4, and there are 4, from 0"),
        (np.array([[0, -1]]), "sends tokens to expert -1"),
        (np.array([[0, 1], [2, 2]]), "sends token 1 to one expert twice"),
    ],
)
def test_what_is_no_table_is_said(table: np.ndarray, said: str) -> None:
    assert said in str(problem_of(table, 4))


def test_tokens_are_counted_over_all_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moekit.data.hash_table.files.CHUNK_TOKENS", 7)
    random = np.random.default_rng(5)
    documents = [random.integers(0, 50, 23).tolist() for _ in range(4)]
    prefixes = [write_pair(tmp_path / "a", documents[:3]), write_pair(tmp_path / "b", documents[3:], "<i4")]
    seen: list[tuple[int, int]] = []
    counts = count_tokens(prefixes, 50, lambda done, total: seen.append((done, total)))
    assert np.array_equal(counts, np.bincount(np.concatenate(documents), minlength=50))
    assert seen[-1] == (92, 92)
    for bad, kind, shown in ((50, "<u2", "50"), (-1, "<i4", "4,294,967,295")):
        with pytest.raises(MoekitError, match=f"it has token {shown}, and the vocabulary ends at 49"):
            count_tokens([write_pair(tmp_path / "c", [[3, bad]], kind)], 50, lambda done, total: None)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A shared root with the data set `words`: 40 ids, the first the most frequent."""
    documents = [[token] * (200 // (token + 1)) for token in range(39)]
    write_pair(tmp_path / "data/words/words_00000_tokens", documents)
    return tmp_path


def run(root: Path, *arguments: str) -> dict[str, object]:
    result = CliRunner().invoke(app, ["data", "hash-table", "words", "--shared-root", str(root), "--json", *arguments])
    if result.exception:
        raise result.exception
    return json.loads(result.output)


SIZES = ("--vocab-size", "40", "--experts", "8", "--topk", "2")


def test_the_command_writes_what_a_recipe_loads(root: Path) -> None:
    said = run(root, *SIZES)
    file = table_file(root / "data/words", "greedy")
    assert said["file"] == str(file)
    table = np.load(file)
    assert (table.shape, table.dtype) == ((1, 40, 2), np.int32)
    record = read_record(file)
    assert record is not None
    assert (record.experts, record.topk, record.vocab_size, record.tables) == (8, 2, 40, 1)
    counts = np.bincount([token for token in range(39) for _ in range(200 // (token + 1))], minlength=40)
    assert said["load"] == [load_of(table[0], counts, 8).tolist()]
    assert said["compared"]["greedy"] == said["max_vio"][0] < said["compared"]["random"]
    assert said["ids_never_seen"] == 1
    assert (run(root, *SIZES)["written"], said["written"]) == (False, True)
    with pytest.raises(MoekitError, match="another table is called `greedy`: greedy, top-2"):
        run(root, *SIZES[:-1], "3")
    assert np.array_equal(np.load(file), table)
    assert run(root, *SIZES[:-1], "3", "--name", "three")["written"]
    assert sorted(one.name for one in file.parent.iterdir()) == ["greedy.json", "greedy.npy", "three.json", "three.npy"]


def test_the_command_says_how_even_it_is(root: Path) -> None:
    arguments = ["--vocab-size", "40", "--experts", "16", "--topk", "2"]
    result = CliRunner().invoke(app, ["data", "hash-table", "words", "--shared-root", str(root), *arguments])
    assert "greedy: MaxVio 0." in result.output
    assert "no table gets below" in result.output
    assert "`moe: {hash_table: greedy}`" in result.output


def published(kind: str, file: Path, tables: dict[str, np.ndarray]) -> Path:
    """A file of tensors, as others write them."""
    if kind == ".npy":
        np.save(file.with_suffix(kind), np.stack(list(tables.values())))
        return file.with_suffix(kind)
    torch = pytest.importorskip("torch")
    tensors = {name: torch.from_numpy(table) for name, table in tables.items()}
    others = {"embed.weight": torch.zeros(4, 3, dtype=torch.bfloat16), "layers.0.ffn.gate.weight": torch.zeros(8, 3)}
    if kind == ".safetensors":
        pytest.importorskip("safetensors.torch").save_file(tensors | others, file.with_suffix(kind))
    else:
        torch.save(tensors | others, file.with_suffix(kind))
    return file.with_suffix(kind)


@pytest.mark.parametrize("kind", [".safetensors", ".pt", ".npy"])
@pytest.mark.parametrize("dtype", [np.int64, np.int32])
def test_published_tables_are_read_one_a_layer(root: Path, kind: str, dtype: type) -> None:
    tables = {f"layers.{n}.ffn.gate.tid2eid": at_random(44, 8, 2, n).astype(dtype) for n in (10, 2)}
    file = published(kind, root / "model", tables)
    said = run(root, "--from", str(file), "--vocab-size", "40")
    in_order = list(tables.values()) if kind == ".npy" else list(tables.values())[::-1]
    written = np.load(str(said["file"]))
    assert np.array_equal(written, np.stack(in_order))
    assert (written.dtype, said["tables"], said["experts"], said["topk"]) == (np.int32, 2, 8, 2)
    assert len(said["load"]) == 2
    assert said["load"][0] != said["load"][1]
    if kind != ".npy":
        one = run(root, "--from", str(file), "--vocab-size", "40", "--tensor", next(iter(tables)), "--name", "one")
        assert np.array_equal(np.load(str(one["file"])), next(iter(tables.values()))[None])


class Harmful:
    def __reduce__(self) -> tuple[object, ...]:
        return (print, ("this must not run",))


def test_nothing_in_a_published_file_is_run(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    torch.save({"tid2eid": Harmful()}, root / "bad.pt")
    with pytest.raises(MoekitError, match="this is no file of tensors"):
        run(root, "--from", str(root / "bad.pt"), "--vocab-size", "40")
    np.save(root / "bad.npy", np.array([Harmful()], object), allow_pickle=True)
    with pytest.raises(MoekitError, match="this is no file of tensors"):
        run(root, "--from", str(root / "bad.npy"), "--vocab-size", "40")
    assert "this must not run" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--experts", "8", "--topk", "2"], "nothing says how many token ids `words` has"),
        (["--vocab-size", "40"], "`--experts` and `--topk` must be given"),
        (["--vocab-size", "40", "--experts", "2", "--topk", "3"], "2 experts are fewer than the 3"),
        (["--vocab-size", "20", "--experts", "2", "--topk", "2"], "it has token 38, and the vocabulary ends at 19"),
        ([*SIZES, "--name", "../up"], "no table can be named `../up`"),
        (["--vocab-size", "40", "--from", "none.npy"], "cannot read: No such file or directory"),
        (["--vocab-size", "40", "--from", "none.pt"], "cannot read: No such file or directory"),
        (["--vocab-size", "40", "--from", "text.pt"], "this is no file of tensors"),
        (["--vocab-size", "40", "--from", "text.safetensors"], "this is no file of tensors"),
        (
            ["--vocab-size", "40", "--from", "short.npy"],
            "the table has 30 rows, and the data's vocabulary 40 token ids",
        ),
        (["--vocab-size", "30", "--from", "short.npy", "--topk", "3"], "sends each token to 2 experts, not 3"),
        (["--vocab-size", "30", "--from", "short.npy", "--experts", "7"], "expert 7, and there are 7, from 0"),
        (["--vocab-size", "40", "--from", "short.npy", "--tensor", "x"], "there is no tensor `x`"),
        (["--vocab-size", "40", "--from", "twice.npy"], "sends token 0 to one expert twice"),
    ],
)
def test_what_does_not_fit_is_refused(
    root: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    monkeypatch.chdir(root)
    np.save("short.npy", in_turns(30, 8, 2))
    np.save("twice.npy", np.zeros((40, 2), np.int32))
    for name in ("text.pt", "text.safetensors"):
        Path(name).write_text("a text that is no tensor")
    with pytest.raises(MoekitError) as refused:
        run(root, *arguments)
    assert said in str(refused.value)
    assert not (root / "data/words/hash_tables").exists()
