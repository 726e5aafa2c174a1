"""The busiest expert rank: of counts, of the files that Megatron writes, and of a MaxVio alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from moekit.plan.memory.imbalance import busiest_of_counts, busiest_of_violation, read_counts
from moekit.problems import MoekitError


def test_a_rank_is_the_sum_of_its_experts() -> None:
    counts = np.array([[7.0, 1, 0, 0, 4, 4, 4, 4]])  # mean 3
    found = busiest_of_counts(counts, np.array([1, 2, 4, 8]))
    assert found == pytest.approx([1, 16 / 12, 8 / 6, 7 / 3])


def test_layers_are_averaged_as_a_rank_keeps_them_all() -> None:
    counts = np.array([[8.0, 0], [0, 8]])
    assert busiest_of_counts(counts, np.array([2])) == pytest.approx([1])


def test_a_maxvio_is_an_interval() -> None:
    """Handbook 3.3: at MaxVio 7 of 64 experts on 8 ranks, the busiest GPU had about twice the mean."""
    least, most = busiest_of_violation(7, 64, np.array([8, 64]))
    assert least == pytest.approx([1, 8])
    assert most == pytest.approx([8, 8])
    least, most = busiest_of_violation(1, 8, np.array([1, 2]))
    assert least == pytest.approx([1, 1])
    assert most == pytest.approx([1, 2])


def written(folder: Path, ranks: int, tokens: list[list[int]]) -> Path:
    """Counts as Megatron writes them (training/activation_logging.py): a line a layer, a list a micro batch."""
    folder.mkdir(parents=True)
    local = len(tokens[0]) // ranks
    for rank in range(ranks):
        lines = [
            {"iter": 0, "block": "decoder", "layer": layer, "tpe": [counts[rank * local : (rank + 1) * local]]}
            for layer, counts in enumerate(tokens)
        ]
        (folder / f"rank{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


TOKENS = [[9, 3, 2, 2, 0, 0, 0, 0], [4, 4, 0, 0, 4, 4, 0, 0]]


@pytest.mark.parametrize("place", [".", "checkpoints/tokens_per_expert"])
def test_counts_of_a_run_for_any_layout(place: str, tmp_path: Path) -> None:
    written(tmp_path / "run" / place, 4, TOKENS)
    counts = read_counts(tmp_path / "run", 8)
    assert counts.tolist() == TOKENS
    assert busiest_of_counts(counts, np.array([2])) == pytest.approx([1.5])


def test_counts_of_another_recipe_are_refused(tmp_path: Path) -> None:
    folder = written(tmp_path / "counts", 4, TOKENS)
    with pytest.raises(MoekitError, match="the counts are those of another recipe"):
        read_counts(folder, 12)
    with pytest.raises(MoekitError, match="of which 9 are no multiple"):
        read_counts(folder, 9)
    with pytest.raises(MoekitError, match="there is no such file or folder"):
        read_counts(tmp_path / "nothing", 8)
    (tmp_path / "empty").mkdir()
    with pytest.raises(MoekitError, match="there are no counts of tokens per expert"):
        read_counts(tmp_path / "empty", 8)
    (folder / "rank0.jsonl").write_text("{}\n")
    with pytest.raises(MoekitError, match="the first line has no tokens per expert"):
        read_counts(folder, 8)
