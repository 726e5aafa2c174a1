"""What the quickstart claims of its training, on a shorter one: it learns, its router settles, and balancing is why."""

from statistics import fmean

import pytest
from launched import STEPS, Launch, Launched

from moekit.data.shards import held_out_unigram_entropy_nats
from moekit.launch.rundir import RunDir, data_dir
from moekit.watch.counts import RankLayout, routing_trace, tokens_per_expert
from moekit.watch.evenness import max_vio
from moekit.watch.metrics import MetricsReader, history

pytestmark = [pytest.mark.megatron, pytest.mark.train, pytest.mark.timeout(4000)]

UNBALANCED = """
base: trained.yaml
balance: {type: none, aux_loss_coeff: null}
"""


def layout(run: RunDir) -> RankLayout:
    reader = MetricsReader(run.path)
    reader.poll()
    found = RankLayout.from_args(reader.config)
    assert found is not None
    return found


def mean_max_vios(run: RunDir) -> list[float]:
    """Of each counted iteration, the mean over the layers."""
    counted = tokens_per_expert(run.tokens_per_expert, layout(run))
    return [fmean([max_vio(load) or 0.0 for load in interval.layers.values()]) for interval in counted]


def settles(vios: list[float]) -> bool:
    """Whether MaxVio's mean over the last tenth is under a third of that over the first tenth."""
    tenth = len(vios) // 10
    return fmean(vios[-tenth:]) < fmean(vios[:tenth]) / 3


def test_the_model_learns_more_than_frequencies(trained: Launched) -> None:
    prefix = data_dir(trained.run.path.parents[1], "python-docs") / "python-docs_00000_tokens"
    entropy = held_out_unigram_entropy_nats(prefix, "95,5,0")
    validation = history(trained.run.path)[STEPS]["lm loss validation"]
    assert validation <= entropy - 1.0
    assert f"validation loss {validation:.3f} nats" in trained.text


def test_the_router_settles(trained: Launched) -> None:
    vios = mean_max_vios(trained.run)
    assert len(vios) == STEPS // 4
    assert settles(vios), vios


def test_without_balancing_it_does_not(trained: Launched, launch: Launch) -> None:
    launched = launch("unbalanced", UNBALANCED)
    assert launched.wait() == 0, launched.text
    vios = mean_max_vios(launched.run)
    assert len(vios) == len(mean_max_vios(trained.run))  # as long a training
    assert not settles(vios), vios


def test_every_token_is_counted(trained: Launched) -> None:
    for interval in tokens_per_expert(trained.run.tokens_per_expert, layout(trained.run)):
        assert interval.coverage.complete
        assert [sum(load) for load in interval.layers.values()] == [16 * 256 * 2] * 4  # every token, to 2 experts


def test_first_and_last_steps_are_traced(trained: Launched) -> None:
    traced = list(routing_trace(trained.run.attempt(1).routing, layout(trained.run)))
    assert [interval.iteration for interval in traced] == [1, 2, 3, STEPS - 2, STEPS - 1, STEPS]
    assert all(interval.coverage.complete for interval in traced)
    counted = {i.iteration: i.layers for i in tokens_per_expert(trained.run.tokens_per_expert, layout(trained.run))}
    assert traced[-1].layers == counted[STEPS]  # two ways to see the same


def test_what_is_shown_is_what_was_logged(trained: Launched) -> None:
    lines = trained.text.splitlines()
    rows = [line.split() for line in lines if line.strip().split("/")[0].isdecimal() and f"/{STEPS} " in line]
    assert [row[0] for row in rows] == [f"{step}/{STEPS}" for step in range(10, STEPS + 1, 10)]
    logged = history(trained.run.path)
    for row in rows:
        last = int(row[0].partition("/")[0])
        steps = range(last - 9, last + 1)
        assert row[1] == f"{fmean([logged[step]['lm loss'] for step in steps]):.3f}"
        assert row[2] == f"{fmean([logged[step]['load_balancing_loss'] for step in steps]):.3f}"
    vios = dict(zip(range(4, STEPS + 1, 4), mean_max_vios(trained.run), strict=True))
    assert rows[-1][3] == f"{vios[STEPS]:.2f}"
    assert rows[-1][-1] == "0:00"


def test_metrics_are_in_trackio(trained: Launched) -> None:
    import sqlite3

    with sqlite3.connect(trained.run.path.parents[1] / "trackio" / "moekit.db") as database:
        found = database.execute(
            "SELECT DISTINCT step FROM metrics WHERE run_name = 'trained' ORDER BY step"
        ).fetchall()
    assert [step for (step,) in found] == list(range(1, STEPS + 1))
