"""`check`, `show`, `flags`, `diff`, `new`, `schema`: what they print, word for word, and where."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from moekit import cli, share
from moekit.cluster.profile import find_cluster
from moekit.launch.run_files import run_arguments
from moekit.megatron.flags import argv
from moekit.recipe.load import load

GOLDEN = Path(__file__).parent / "golden"
RECIPES = share.folder("recipes")
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The command in this process: exit code, standard output, standard error."""

    def command(*words: str, cwd: Path = RECIPES) -> tuple[int, str, str]:
        monkeypatch.chdir(cwd)
        monkeypatch.setattr(sys, "argv", ["moekit", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        printed = capsys.readouterr()
        return int(ended.value.code or 0), printed.out, printed.err

    return command


@pytest.mark.parametrize("name", [name for name in share.shipped_recipes() if not name.startswith("settings/")])
@pytest.mark.parametrize("start", ["first", "resume"])
def test_flags_of_every_recipe_but_settings(
    name: str, start: str, run: Run, golden_file: Callable[[Path, str], None]
) -> None:
    profile = share.made_for(name)
    code, out, _ = run(
        *("flags", name), *(["--resume"] if start == "resume" else []), *(["--profile", profile] if profile else [])
    )
    assert code == 0
    shared = find_cluster(profile).shared_root
    words = argv(run_arguments(load(name).recipe, Path(name).name, shared, resume=start == "resume"))
    assert shlex.split(out) == words
    golden_file(GOLDEN / "flags" / f"{name.replace('/', '_')}.{start}.txt", out)


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("show_first_moe.txt", ["show", "first_moe.yaml"]),
        ("show_quickstart_dense.txt", ["show", "settings/quickstart_dense.yaml"]),
        ("show_smoke.json", ["show", "first_moe_smoke.yaml", "--json"]),
        ("diff_dense_first_moe.txt", ["diff", "dense.yaml", "first_moe.yaml"]),
        ("diff_upcycle.json", ["diff", "first_moe.yaml", "upcycle.yaml", "--json"]),
        ("flags_dense.json", ["flags", "dense.yaml", "--name", "trial", "--json"]),
    ],
)
def test_output(file: str, words: list[str], run: Run, golden_file: Callable[[Path, str], None]) -> None:
    code, out, err = run(*words)
    assert (code, err) == (0, "")
    if file.endswith(".json"):
        json.loads(out)
    golden_file(GOLDEN / file, out)


def test_a_recipe_does_not_differ_from_itself(run: Run) -> None:
    assert run("diff", "dense", "dense.yaml") == (0, "", "no difference\n")


def test_check_says_what_it_took_for_granted(run: Run) -> None:
    assert run("check", "dense") == (0, "", "dense: no problems, checked against aws-p5 (no --profile given)\n")
    assert run("check", "dense", "--profile", "aws-p5") == (0, "", "dense: no problems, checked against aws-p5\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["check", ""], "there is no recipe ``"),
        (["check", "dense", "--profile", ""], "there is no cluster profile ``"),
        (["flags", "dense", "--name", ""], "a run cannot be named ``"),
        (["launch", "dense", "--dry-run", "--name", ""], "a run cannot be named ``"),
        (["launch", "dense", "--dry-run", "--profile", ""], "there is no cluster profile ``"),
    ],
)
def test_a_variable_that_a_script_left_empty_is_not_a_default(words: list[str], said: str, run: Run) -> None:
    code, out, err = run(*words)
    assert (code, out) == (1, "")
    assert err.startswith(f"error: {said}\n")


def test_a_warning_is_no_failure(run: Run) -> None:
    code, out, err = run("check", "settings/hash_layers")
    assert (code, out) == (0, "")
    assert "warning: 3 hash layers begin without a table of token ids" in err
    assert err.endswith("settings/hash_layers: 1 warning, checked against aws-p5 (no --profile given)\n")


def test_check_as_json(run: Run, tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("base: first_moe\nrouter:\n  topkk: 8\n")
    code, out, err = run("check", "x.yaml", "dense", "--json", cwd=tmp_path)
    problem = {
        "level": "error",
        "where": "x.yaml:3",
        "what": "unknown field `router.topkk`",
        "hint": "did you mean `topk`?",
    }
    assert (code, json.loads(out), err) == (1, {"x.yaml": [problem], "dense": []}, "")


def test_flags_of_a_wrong_recipe_are_not_printed(run: Run, tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("base: first_moe\nrouter:\n  topk: 65\n")
    code, out, err = run("flags", "x.yaml", cwd=tmp_path)
    assert (code, out) == (1, "")
    assert err.startswith("x.yaml:3: a token cannot go to router.topk = 65 of 64 experts\n")


def test_show_keeps_a_text_on_its_line(run: Run, tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text('summary: "two\\nlines \\e[31m"\n')
    _, out, _ = run("show", "x.yaml", cwd=tmp_path)
    assert out.splitlines()[0].split()[0] == "summary"
    assert '"two\\nlines \\u001b[31m"' in out
    assert "\x1b" not in out


def test_new_writes_a_recipe_that_checks(run: Run, tmp_path: Path) -> None:
    code, out, err = run("new", "mine", "--from", "dense", cwd=tmp_path)
    assert (code, out) == (0, "")
    assert err == "mine.yaml written; check it with `moekit check mine.yaml`\n"
    lines = (tmp_path / "mine.yaml").read_text().splitlines()
    schema = lines[0].removeprefix("# yaml-language-server: $schema=")
    assert (tmp_path / schema).resolve() == (RECIPES / "schema.json").resolve()
    assert lines[1] == 'base: "dense"'
    assert load("mine.yaml").recipe.model == load("dense").recipe.model
    assert run("check", "mine.yaml", cwd=tmp_path)[0] == 0


def test_new_from_a_file_finds_it_from_another_folder(run: Run, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "parent.yaml").write_text("base: dense\nsummary: parent\n")
    assert run("new", "sub/child.yaml", "--from", "parent.yaml", cwd=tmp_path)[0] == 0
    assert load("sub/child.yaml").source.find("base").text == "../parent.yaml"  # type: ignore[union-attr]
    assert run("check", "sub/child.yaml", cwd=tmp_path)[0] == 0


def test_new_in_a_folder_with_a_space_says_commands_that_can_be_pasted(run: Run, tmp_path: Path) -> None:
    (tmp_path / "my runs").mkdir()
    code, _, err = run("new", "my runs/mine", cwd=tmp_path)
    assert (code, err) == (0, "my runs/mine.yaml written; check it with `moekit check 'my runs/mine.yaml'`\n")
    assert "`moekit show 'my runs/mine.yaml'`" in (tmp_path / "my runs/mine.yaml").read_text()


def test_new_never_overwrites(run: Run, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("summary: precious\n")
    code, _, err = run("new", "mine", cwd=tmp_path)
    assert (code, err) == (1, "error: `mine.yaml` exists\n    hint: choose another name, or edit it\n")
    assert (tmp_path / "mine.yaml").read_text() == "summary: precious\n"


@pytest.mark.parametrize("name", ["", ".yaml", "a b", "new\nline", "-x", "é", "x" * 200])
def test_new_takes_names_that_a_run_may_have(name: str, run: Run, tmp_path: Path) -> None:
    code, out, err = run("new", "--", name, cwd=tmp_path)
    assert (code, out) == (1, "")
    assert err.startswith("error: a recipe cannot be named `")
    assert list(tmp_path.iterdir()) == []


def test_new_in_no_folder(run: Run, tmp_path: Path) -> None:
    code, _, err = run("new", "nowhere/mine", cwd=tmp_path)
    assert (code, err) == (1, "error: cannot write `nowhere/mine.yaml`: no such file or directory\n")


def test_new_from_nothing(run: Run, tmp_path: Path) -> None:
    code, _, err = run("new", "mine", "--from", "first_mo", cwd=tmp_path)
    assert (code, err) == (1, "error: there is no recipe `first_mo`\n    hint: did you mean `first_moe`?\n")
    assert list(tmp_path.iterdir()) == []


def test_schema(run: Run) -> None:
    code, out, err = run("schema")
    assert (code, err) == (0, "")
    assert json.loads(out)["properties"]["router"]["properties"]["topk"] == {
        "type": ["integer", "null"],
        "minimum": 1,
        "description": "Experts each token is sent to. Null: not said, Megatron decides. "
        "Megatron: `--moe-router-topk`. Handbook 2.5.",
    }


def test_a_command_that_is_none(run: Run) -> None:
    code, out, err = run("chekc", "dense")
    assert (code, out) == (2, "")
    assert "Did you mean 'check'?" in err


def test_version(run: Run) -> None:
    from moekit import __version__

    assert run("--version") == (0, f"moekit {__version__}\n", "")


def test_output_is_utf_8_whatever_the_terminal_is(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("summary: naïve 世界\n")
    command = [sys.executable, "-m", "moekit", "show", "x.yaml"]
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=True, timeout=60)
    assert done.stdout.decode().splitlines()[0].split() == ["summary", "naïve", "世界", "x.yaml:1"]


@pytest.mark.parametrize("words", [["show", "dense"], ["check", "dense", "--json"]], ids=["much", "little"])
def test_a_full_disk_behind_the_output_is_a_message(words: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "moekit", *words]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (1, "error: cannot write: no space left on device\n")


@pytest.mark.parametrize("words", [["schema"], ["--version"]], ids=["much", "little"])
def test_a_reader_that_has_enough_is_no_error(words: list[str], tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "moekit", *words]
    try:
        done = subprocess.run(command, cwd=tmp_path, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_working_directory_that_is_gone_is_a_message(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    script = f"rmdir {gone}; exec {sys.executable} -c 'from moekit.cli import main; main()' check dense"
    done = subprocess.run(["bash", "-c", script], cwd=gone, capture_output=True, text=True, timeout=60, check=False)
    told = "error: the working directory is not there any more\n    hint: `cd` to one that is\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", told)


@pytest.mark.parametrize("words", [["check"], ["launch"], ["megatron", "table"]], ids=lambda words: words[-1])
def test_help_fills_its_lines(words: list[str], run: Run) -> None:
    """Each line but a paragraph's last is as long as the next word allows."""
    _, out, _ = run(*words, "--help")
    lines = [line.strip() for line in out.partition("╭")[0].splitlines()]
    for line, after in pairwise(lines):
        assert not after or not line or len(line) + len(after.split()[0]) >= 76, line


@pytest.mark.parametrize("words", [["--help"], ["chekc"]])
def test_a_terminal_of_no_width_is_not_silent(words: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "moekit", *words]
    environment = {**os.environ, "COLUMNS": "0"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert "Usage: python -m moekit" in done.stdout + done.stderr


def test_a_defect_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: str) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr("moekit.recipe.commands.load", broken)
    monkeypatch.setattr(sys, "argv", ["moekit", "show", "dense"])
    with pytest.raises(RuntimeError, match="a defect"):
        cli.main()


def test_import_takes_a_world_size_that_is_one(run: Run) -> None:
    script = str(Path(__file__).parent / "import_cases" / "dense_8gpu.sh")
    assert "  gpus: 8\n" in run("import", script)[1]
    assert "  gpus: 16\n" in run("import", script, "--gpus", "16")[1]
    for none in ("0", "-3"):
        code, out, err = run("import", script, "--gpus", none)
        assert (code, out) == (2, "")
        assert "--gpus" in err


def test_import_prints_a_recipe_that_passes(run: Run, tmp_path: Path) -> None:
    script = Path(__file__).parent / "import_cases" / "dense_8gpu.sh"
    code, out, err = run("import", str(script), cwd=tmp_path)
    assert (code, err) == (0, "")
    assert out.startswith("# yaml-language-server: $schema=")
    assert out.partition("\n")[0].endswith("recipes/schema.json")
    (tmp_path / "mine.yaml").write_text(out)
    assert run("check", "mine.yaml", cwd=tmp_path) == (
        0,
        "",
        "mine.yaml: no problems, checked against aws-p5 (no --profile given)\n",
    )
