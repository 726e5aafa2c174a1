"""The proofs with the real trainer: that they hold, that wrong expectations fail, and that the document says so.

Ten short runs, and three more that go wrong in one known way each.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from moekit.launch.rundir import run_dir
from moekit.prove import record

pytestmark = [pytest.mark.megatron, pytest.mark.train, pytest.mark.timeout(4000)]

PAGE = Path(__file__).parents[2] / "docs" / "proofs.md"
SCALED = "router: {topk_scaling_factor: 1.01}"


class Desk:
    """A working directory whose `moekit-local` all of these tests share."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.root = path / "moekit-local"

    def moekit(self, *words: str, errors: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "moekit", *words]
        pipe = subprocess.PIPE
        return subprocess.run(command, cwd=self.path, stdout=pipe, stderr=errors, text=True, check=False)

    def launch(self, name: str, base: str, changes: str) -> None:
        """Train a variant of a shipped recipe, as the run `name`."""
        (self.path / f"{name}.yaml").write_text(f"base: {base}\n{changes}\n")
        done = self.moekit("launch", f"{name}.yaml")
        assert done.returncode == 0, done.stdout + done.stderr

    def kept(self, proof: str) -> record.Record:
        """The one record of a proof."""
        (found,) = record.read(self.root, proof)
        return found


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Desk:
    return Desk(tmp_path_factory.mktemp("proofs"))


@pytest.fixture(scope="module")
def proven(desk: Desk) -> dict[str, str]:
    """What each proof prints when it trains its runs."""
    shown = {}
    for proof in record.NAMES:
        done = desk.moekit("prove", proof, errors=subprocess.STDOUT)
        assert done.returncode == 0, done.stdout
        shown[proof] = done.stdout
    return shown


def numbers(kept: record.Record, name: str) -> list[tuple[float, float]]:
    return [tuple(step[name]) for step in kept["steps"]]


def test_one_expert_trains_as_its_dense_model(proven: dict[str, str], desk: Desk) -> None:
    kept = desk.kept("one-expert")
    assert kept["verdict"] == "passed"
    assert [step["iterations"] for step in kept["steps"]] == [[15 + n, n] for n in range(1, 16)]
    assert max(abs(moe - dense) for dense, moe in numbers(kept, "lm loss")) <= 0.00087
    assert {moe for _, moe in numbers(kept, "load_balancing_loss")} == {1.0}
    assert all(dense <= 17 and abs(moe - 4 * 128) <= 17 for dense, moe in numbers(kept, "num-zeros"))
    losses = [dense for dense, _ in numbers(kept, "lm loss")]
    assert max(losses) - min(losses) > 0.1  # what is equal changes


def test_slices_add_up_to_the_layer(proven: dict[str, str], desk: Desk) -> None:
    kept = desk.kept("slices")
    assert kept["verdict"] == "passed"
    ((dense, moe),) = numbers(kept, "lm loss")
    assert abs(moe - dense) <= 1e-5
    assert kept["steps"][0]["iterations"] == [31, 1]


def test_a_recipe_trained_twice_is_the_same_twice(proven: dict[str, str], desk: Desk) -> None:
    kept = desk.kept("deterministic")
    assert kept["verdict"] == "passed"
    assert len(kept["steps"]) == 12
    for name in ("lm loss", "load_balancing_loss", "grad-norm", "num-zeros"):
        assert all(first == second for first, second in numbers(kept, name))
    compared = kept["without_deterministic_mode"]
    assert [run["name"] for run in compared["runs"]] == ["quickstart_repeated", "quickstart_repeated_again"]
    assert [check["what"] for check in compared["checks"]] == [check["what"] for check in kept["checks"]]


def test_a_scaled_expert_is_not_the_dense_layer(proven: dict[str, str], desk: Desk) -> None:
    """Its loss parts by more than rounding at once, and from the dense run's by more than the bound as both train."""
    desk.launch("scaled_slices", "settings/quickstart_slices", SCALED)
    done = desk.moekit("prove", "slices", "--runs", "quickstart_squared_relu_continued", "scaled_slices")
    assert done.returncode == 1
    assert re.search(r"^not proven: LM loss of the first step, .* at step 1, by -?[\d.e-]+", done.stdout, re.MULTILINE)
    assert desk.kept("slices")["verdict"] == "failed"
    desk.launch("scaled_expert", "settings/quickstart_one_expert", SCALED.replace("1.01", "2.0"))
    done = desk.moekit("prove", "one-expert", "--runs", "quickstart_dense_continued", "scaled_expert")
    assert done.returncode == 1
    assert re.search(r"^not proven: LM loss, .* parts at step \d+, by -?[\d.e-]+", done.stdout, re.MULTILINE)
    checks = {check["what"]: check["holds"] for check in desk.kept("one-expert")["checks"]}
    assert checks["load-balancing loss less 1"]  # only what was changed parts


@pytest.fixture
def seeded(proven: dict[str, str], desk: Desk) -> Iterator[Path]:
    """A run with another seed, and one that says of itself that it has not."""
    desk.launch("seeded", "settings/quickstart_deterministic", "train: {seed: 1235}")
    honest, disguised = run_dir(desk.root, "seeded"), run_dir(desk.root, "disguised")
    shutil.copytree(honest.path, disguised.path)
    shutil.copy(run_dir(desk.root, "quickstart_deterministic").recipe, disguised.recipe)
    yield disguised.path
    shutil.rmtree(disguised.path)


def test_another_seed_is_another_training(seeded: Path, desk: Desk) -> None:
    done = desk.moekit("prove", "deterministic", "--runs", "quickstart_deterministic", "seeded")
    assert (done.returncode, done.stdout) == (1, "")
    assert "`train.seed` is 1234 in `quickstart_deterministic` and 1235 in `seeded`" in done.stderr
    assert desk.kept("deterministic")["verdict"] == "passed"
    done = desk.moekit("prove", "deterministic", "--runs", "quickstart_deterministic", "disguised")
    assert done.returncode == 1
    assert "not proven: LM loss parts at step 1, by" in done.stdout
    assert desk.kept("deterministic")["verdict"] == "failed"


def test_what_is_trained_is_judged_again_without_training(proven: dict[str, str], desk: Desk) -> None:
    done = desk.moekit("prove", "slices", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["verdict"] == "passed"
    assert done.stderr.count("trained already, in moekit-local/runs/") == 3
    software = run_dir(desk.root, "quickstart_slices").attempt(1).software
    text = software.read_text()
    software.write_text(text.replace('"torch": "', '"torch": "1'))
    done = desk.moekit("prove", "slices")
    software.write_text(text)
    assert done.returncode == 1
    assert "moekit-local/runs/quickstart_slices: it was trained with torch 1" in done.stderr
    assert "`--again` removes the runs of this proof and trains them anew" in done.stderr


def masked(line: str) -> str:
    """A line without numbers and times, which differ between machines."""
    return re.sub(r"-?\d[\d.,:e-]*", "#", " ".join(line.split()))


def test_the_page_shows_what_is_printed(proven: dict[str, str]) -> None:
    blocks = re.findall(r"^```text\n\$ moekit prove (\S+)\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert [proof for proof, _ in blocks] == list(record.NAMES)
    for proof, shown in blocks:
        real = iter([masked(line) for line in proven[proof].splitlines()])
        for line in filter(str.strip, shown.splitlines()):
            assert line.strip() == "..." or masked(line) in real, f"`moekit prove {proof}` does not print: {line}"
