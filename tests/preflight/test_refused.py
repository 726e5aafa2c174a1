"""What a run does after an attempt whose nodes were refused (`job/retry.py`)."""

import json
from pathlib import Path

import pytest

from moekit.job.retry import end, start


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "retry.json").write_text('{"requeue": false, "max_attempts": 100, "world": 16, "ranks_per_node": 8}')
    (tmp_path / "argv.first").write_text("")
    (tmp_path / "argv.resume").write_text("")
    return tmp_path


def refuse(run: Path, bad: dict[str, str], nodes: list[str]) -> list[str]:
    """An attempt that is refused; what train.sh is told to do then."""
    went, number, *_ = start(run, nodes)
    assert went == "go"
    sentence = "; ".join(f"{node}: {why}" for node, why in bad.items()) or "everywhere"
    (run / "attempts" / number / "refused.json").write_text(json.dumps({"sentence": sentence, "bad": bad}))
    return end(run, 1, nodes)


def test_it_goes_back_into_the_queue_without_the_bad_node(run: Path) -> None:
    """Also a run that does not go on by itself after a failure: nothing was trained yet."""
    assert refuse(run, {"n2": "slow"}, ["n1", "n2"]) == ["requeue", "n2"]
    assert start(run, ["n1", "n2"]) == ["requeue", "n2"]  # Slurm did not heed it
    assert refuse(run, {"n3": "slow"}, ["n1", "n3"]) == ["requeue", "n2,n3"]
    assert start(run, ["n1", "n4"])[:2] == ["go", "3"]
    assert json.loads((run / "attempts/1/end.json").read_text())["kind"] == "refused"


def test_where_no_node_is_to_blame_it_stops(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert refuse(run, {}, ["n1", "n2"]) == ["exit", "1"]
    said = "attempt 1 ended at step 0: everywhere; no node alone is to blame, so others would be refused as well\n"
    assert capsys.readouterr().err.endswith(said)


def test_it_does_not_go_through_all_nodes_of_a_cluster(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(4):
        assert refuse(run, {f"n{number}": "slow"}, [f"n{number}", "m"])[0] == "requeue"
    assert refuse(run, {"n4": "slow"}, ["n4", "m"]) == ["exit", "1"]
    assert "5 attempts in a row began at step 0 and saved nothing newer" in capsys.readouterr().err


def test_damaged_words_of_a_refusal_are_none(run: Path) -> None:
    _, number, *_ = start(run, ["n1", "n2"])
    (run / "attempts" / number / "refused.json").write_text("{")
    assert end(run, 1, ["n1", "n2"]) == ["exit", "1"]
    assert json.loads((run / "attempts" / number / "end.json").read_text())["kind"] == "failed"
