"""The handbook's 42 symptoms: each whole, each remedy a recipe that `check` takes, each found by a person's words."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import yaml

from moekit.cluster.profile import find_cluster
from moekit.doctor.judge import TESTS
from moekit.doctor.symptoms import Remedy, nearest, symptoms
from moekit.recipe.check import problems_of
from moekit.recipe.load import load

REMEDIES = [(one.key, remedy) for one in symptoms().values() for remedy in one.remedies]


def test_all_42_are_there_and_whole() -> None:
    assert len(symptoms()) == 42
    labels = Counter(label for one in symptoms().values() for label in one.labels)
    assert labels == {"slow": 16, "OOM": 3, "blows up": 9, "learns badly": 16, "won't start": 2}
    for one in symptoms().values():
        assert all((one.signal, one.section, one.needs, one.get))
        assert one.remedies or one.advice


def test_what_files_show_is_looked_for() -> None:
    assert {one.test for one in symptoms().values() if one.test} == set(TESTS)


@pytest.mark.parametrize(("key", "remedy"), REMEDIES, ids=[f"{key}-{one.why[:24]}" for key, one in REMEDIES])
def test_a_remedy_is_a_recipe_that_passes(key: str, remedy: Remedy, tmp_path: Path) -> None:
    """On the profile that it is for."""
    path = tmp_path / "remedy.yaml"
    path.write_text(yaml.safe_dump({"base": remedy.base, "summary": remedy.why, **remedy.change}))
    loaded = load(str(path))
    assert loaded.recipe != load(remedy.base).recipe or key in ("latent_slower", "full_recompute")
    found = problems_of(loaded, find_cluster(remedy.profile or None))
    assert [problem.what for problem in found if problem.level == "error"] == []


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("NaN out of nowhere, nothing moved before it", "nan_unannounced"),
        ("throughput falls over time", "throughput_falls"),
        ("NCCL Using network Socket", "socket"),
        ("dead experts in spite of the aux loss", "dead_with_aux"),
        ("one rank is out of memory", "one_rank_oom"),
        ("Muon diverges in the first steps", "muon_diverges"),
        ("nearly half of the step is all to all on one node", "all_to_all_half"),
        ("unexpected keyword argument 'model' when upcycling", "upcycling_errors"),
        ("exit code 16 twice on one node", "exit_16_twice"),
        ("quantile balancing: micro batches uneven", "quantile_micro_uneven"),
        ("reward collapses in RL", "rl_gap"),
        ("still full recomputation, whole layers are recomputed", "full_recompute"),
        ("aux loss near 1 but one GPU slow", "aux_one_gpu_slow"),
        ("capacity factor makes the loss worse", "capacity_worse"),
        ("overlap refused: disable full recomputation", "overlap_assert"),
    ],
)
def test_a_persons_words_find_it(words: str, key: str) -> None:
    assert nearest(words)[0].key == key


def test_each_is_found_by_its_own_words() -> None:
    for key, one in symptoms().items():
        assert nearest(one.signal)[0].key == key
        assert nearest(key) == [one]


def test_words_that_name_none_find_none() -> None:
    assert nearest("the coffee is cold") == []
    assert nearest("") == []
