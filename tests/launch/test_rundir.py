import dataclasses
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from moekit import share
from moekit.launch.flat import flat_yaml
from moekit.launch.folders import claim, place, write
from moekit.launch.run_files import lines, owned_arguments, run_arguments, run_files
from moekit.launch.rundir import RunDir, run_dir
from moekit.megatron.flags import argv
from moekit.problems import MoekitError
from moekit.recipe.load import Loaded, load

Changed = Callable[..., Loaded]

OR_NOT = "--exit-on-missing-checkpoint"


def words(loaded: Loaded, resume: bool = False) -> str:
    return " ".join(argv(owned_arguments(loaded.recipe, "changed", "/shared", resume)))


TRACKED = (
    "--tensorboard-dir attempts/N/tensorboard "
    "--wandb-project moekit --wandb-exp-name changed --wandb-save-dir attempts/N/"
)
DATA = "--data-args-path /shared/data/fineweb-edu/data-args.txt --data-cache-path /shared/data/fineweb-edu/cache"
TOKENIZER = "--tokenizer-model /shared/tokenizers/llama-3.2"


@pytest.mark.parametrize(
    ("text", "first", "resume"),
    [
        ("", f"{DATA} {TOKENIZER} {TRACKED}", f"{DATA} {TOKENIZER} {TRACKED}"),
        ("data: {name: null, tokenizer: null, mock_data: true}", TRACKED, TRACKED),
        (
            "data: {shards: [fineweb-edu_00000_tokens, sub/b]}",
            "--data-path /shared/data/fineweb-edu/fineweb-edu_00000_tokens /shared/data/fineweb-edu/sub/b "
            f"--data-cache-path /shared/data/fineweb-edu/cache {TOKENIZER} {TRACKED}",
            None,
        ),
        (
            "checkpoint: {save: true, from_run: parent}\ndata: {name: null, tokenizer: null}",
            f"--save checkpoints --load /shared/runs/parent/checkpoints {OR_NOT} {TRACKED}",
            f"--save checkpoints --load checkpoints {OR_NOT} {TRACKED}",
        ),
        (
            "checkpoint: {from_run: parent}\ndata: {name: null, tokenizer: null}",
            f"--load /shared/runs/parent/checkpoints {OR_NOT} {TRACKED}",
            f"--load /shared/runs/parent/checkpoints {OR_NOT} {TRACKED}",
        ),
        (
            "monitor: {routing_trace: true}\ndata: {name: null, tokenizer: null}",
            f"--moe-routing-trace-path attempts/N/routing {TRACKED}",
            None,
        ),
    ],
)
def test_owned_arguments(recipe_of: Changed, text: str, first: str, resume: str | None) -> None:
    loaded = recipe_of(text)
    assert words(loaded) == first
    if resume is not None:
        assert words(loaded, resume=True) == resume


def test_an_own_checkpoint_is_loaded_whole(recipe_of: Changed) -> None:
    """Upcycling and `finetune` are of the first start; what was never saved stays out of every load."""
    text = "moe: {use_upcycling: true}\ncheckpoint: {save: true, from_run: a, finetune: true, %s}"
    options = {"--finetune", "--no-load-optim", "--no-load-rng", "--moe-use-upcycling"}
    recipe = recipe_of(text % "no_load_optim: true, no_load_rng: true").recipe
    assert options <= set(argv(run_arguments(recipe, "x", "/s", resume=False)))
    assert not options & set(argv(run_arguments(recipe, "x", "/s", resume=True)))
    unsaved = recipe_of(text % "no_load_optim: true, no_save_optim: true").recipe
    assert options & set(argv(run_arguments(unsaved, "x", "/s", resume=True))) == {"--no-load-optim"}


def test_a_run_that_saves_nothing_starts_anew(recipe_of: Changed) -> None:
    files = run_files(recipe_of(), "x", "/s")
    assert files["argv.first"] == files["argv.resume"]


@pytest.mark.parametrize("name", ["dense", "first_moe", "a.b-c_d", "_x", "7", "x" * 100])
def test_names_of_runs(name: str) -> None:
    assert run_dir("/s", name).path == Path("/s/runs", name)


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", ".x", "-x", "a/b", "a b", "a\nb", "a;b", "$(b)", "a'b", 'a"b', "ä", "x" * 101, "--dry-run", "%j"],
)
def test_names_that_are_refused(name: str) -> None:
    with pytest.raises(MoekitError, match="a run cannot be named"):
        run_dir("/s", name)


SHIPPED = sorted(path for path in share.folder("recipes").rglob("*.yaml") if path.parent.name != "sweeps")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_the_flat_recipe_loads_to_the_same(path: Path, tmp_path: Path) -> None:
    assert_loads_back(load(str(path)), tmp_path)


def test_hostile_values_survive_the_flat_recipe(recipe_of: Changed, tmp_path: Path) -> None:
    text = r"""
summary: "two\nlines, \"quoted\" \\ # no comment: \u2028 \x85 \x7f \U0001F600"
moe: {layer_freq: "([0]*1+[1]*15)"}
parallel: {pipeline_model_layout: "Et*3|(tt|)*6tmL"}
megatron: {extra: ["--some=a b", "null", "true", "1", "-", " x ", "é", "a: b", "{x}", "!t", "*a", "&a", "%", "@", "`"]}
runtime:
  environment: {A: "null", B: null, no: "no", C: "", D: "1e3", e: "it's $HOME \\ `x`", F: "~"}
  secrets: [HF_TOKEN]
"""
    assert_loads_back(recipe_of(text), tmp_path)


def assert_loads_back(loaded: Loaded, tmp_path: Path) -> None:
    flat = tmp_path / "flat.yaml"
    flat.write_text(flat_yaml(loaded.recipe))
    assert load(str(flat)).recipe == dataclasses.replace(loaded.recipe, base=None)


def test_a_word_with_a_newline_is_refused_by_name() -> None:
    with pytest.raises(MoekitError, match="`--x` has a newline in its value"):
        lines(["--x", "a\nb"])
    assert lines(["--x", "", "a b"]) == "--x\n\na b\n"


def test_a_run_is_claimed_once(tmp_path: Path) -> None:
    said = []

    def try_it() -> None:
        try:
            claim(tmp_path / "runs" / "x")
        except MoekitError as refused:
            said.append(str(refused))
        else:
            said.append("mine")

    threads = [threading.Thread(target=try_it) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    taken = f"error: `{tmp_path}/runs/x` already exists\n    hint: give the run another name with `--name`"
    assert sorted(said) == [*[taken] * 7, "mine"]


def test_a_run_is_placed_whole_and_once(tmp_path: Path) -> None:
    """Every claimant's folder is filled before it is anybody's, and one of them stays."""
    run = tmp_path / "runs" / "x"
    (run.parent / ".x.1").mkdir(parents=True)  # what a killed one left
    os.utime(run.parent / ".x.1", (0, 0))
    place(run, {"a": "0", "job/b": ""})
    for _ in range(2):
        with pytest.raises(MoekitError, match="already exists"):
            place(run, {"a": "1", "c": ""})
    assert sorted(path.name for path in run.iterdir()) == ["a", "job"]
    assert (run / "a").read_text() == "0"
    assert [path.name for path in run.parent.iterdir()] == ["x"]


def test_attempts_are_numbered_once_each(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert run.numbers() == []
    assert [run.new_attempt(), run.new_attempt()] == [1, 2]
    (tmp_path / "attempts" / "10").mkdir()
    (tmp_path / "attempts" / "latest").mkdir()
    assert run.new_attempt() == 11
    assert run.numbers() == [1, 2, 10, 11]


def test_a_failed_write_changes_nothing(tmp_path: Path) -> None:
    write(tmp_path / "x", {"a": "old", "job/b": "old"})
    with pytest.raises(UnicodeEncodeError):
        write(tmp_path / "x", {"a": "new", "new/c": "new", "job/b": "\ud800"})
    with pytest.raises(MoekitError, match="cannot be written: file exists"):
        write(tmp_path / "x", {"a": "new", "job/b/c": "a file is in the way"})
    assert (tmp_path / "x" / "a").read_text() == "old"
    assert sorted(path.name for path in (tmp_path / "x").rglob("*")) == ["a", "b", "job"]


def test_no_space_left(tmp_path: Path) -> None:
    """A real file system of 40 kB: one message, exit code 1, and nothing is left."""
    room = tmp_path / "small"
    room.mkdir()
    script = (
        f"mount -t tmpfs -o size=40k none '{room}' && "
        f"'{sys.executable}' -m moekit launch first_moe --dry-run='{room}/run'; "
        f"code=$?; find '{room}' -mindepth 1; exit $code"
    )
    done = subprocess.run(["unshare", "-rm", "bash", "-c", script], capture_output=True, text=True, cwd=tmp_path)
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"no file system can be mounted here: {done.stderr}")
    assert done.stderr == f"error: `{room}/run` cannot be written: no space left on device\n"
    assert (done.returncode, done.stdout) == (1, "")
