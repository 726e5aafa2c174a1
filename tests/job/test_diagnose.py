"""Diagnostic steps of real runs: what they write, against Megatron's own dumps; and that training does not see them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from job_runs import (
    EXPERT_PARALLEL,
    EXPERTS,
    FULL_RECOMPUTE,
    LAYERS,
    PIPELINE_PARALLEL,
    SAVE,
    TINY_MOE,
    TOPK,
    read_lines,
    read_metrics,
)

from moekit.job import diagnose, samples
from moekit.watch.experts import bias, diagnostics, dumps
from moekit.watch.metrics import MetricsReader

pytestmark = pytest.mark.megatron
torch = pytest.importorskip("torch")

sys.path.insert(0, str(Path(diagnose.__file__).parent))  # `samples` imports its siblings, as in a run

ONE_MICRO_BATCH = ["--global-batch-size", "4"]
SHARED = ["--moe-shared-expert-intermediate-size", "32"]
DUMPS = ["--save-activations-interval", "2", "--save-wgrads-interval", "2"]
BIAS = ["--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias"]
LENGTH = ["--train-iters", "4", "--eval-interval", "100"]
EVERY_SECOND = {"MOEKIT_DIAGNOSE_INTERVAL": "2"}
MEASURED = ("experts/", "router/")


@pytest.fixture(scope="session")
def diagnosed(tmp_path_factory: pytest.TempPathFactory, launch: Callable[..., None]) -> Path:
    """EP = 2, one micro batch a step, so that the first one, which is looked at, is the last one, which is dumped."""
    run_dir = tmp_path_factory.mktemp("diagnosed")
    argv = [*TINY_MOE, *EXPERT_PARALLEL, *SAVE, *ONE_MICRO_BATCH, *SHARED, *BIAS, *DUMPS, *LENGTH]
    launch(run_dir, argv, env=EVERY_SECOND)
    return run_dir


def records(run_dir: Path, rank: int) -> list[dict[str, Any]]:
    return read_lines(run_dir / "attempts/1/diagnostics" / f"rank{rank}.jsonl")


def config(run_dir: Path) -> dict[str, Any]:
    reader = MetricsReader(run_dir)
    reader.poll()
    return reader.config


@pytest.mark.train
def test_each_rank_writes_its_layers_at_each_diagnostic_step(diagnosed: Path) -> None:
    for rank, experts in ((0, [0, 1, 2, 3]), (1, [4, 5, 6, 7])):
        lines = records(diagnosed, rank)
        assert [(line["step"], line["layer"]) for line in lines] == [(2, 0), (2, 1), (4, 0), (4, 1)]
        for line in lines:
            assert (line["block"], line["rank"], line["experts"]) == ("decoder", rank, experts)
            assert not [name for name, value in line.items() if isinstance(value, dict) and "refused" in value]
            assert line["dropped"] == {"assignments": 128 * TOPK, "dropped": 0}
            assert line["flips"]["tokens"] == 128
            assert line["shared_over_routed"]["tokens"] == 128


@pytest.mark.train
def test_norms_are_those_of_megatrons_dump(diagnosed: Path) -> None:
    found = diagnostics.read(diagnosed, EXPERTS)
    assert dumps.iterations(diagnosed) == [2, 4] == list(found.steps)
    for iteration in (2, 4):
        dump = dumps.read(diagnosed, iteration, dumps.Shape.of(config(diagnosed)))
        assert (dump.refused, dump.skipped, list(dump.norms)) == ({}, [], [f"layer_{i}" for i in range(LAYERS)])
        for name, norms in dump.norms.items():
            live = found.steps[iteration][name].norms
            assert live is not None
            assert live.rows.tolist() == norms.rows.tolist()
            assert int(norms.rows.sum()) == 2 * 128 * TOPK
            assert live.mean == pytest.approx(norms.mean, rel=1e-6)


@pytest.mark.train
def test_zeros_are_those_of_megatrons_gradients(diagnosed: Path) -> None:
    for iteration in (2, 4):
        for rank in (0, 1):
            file = diagnosed / f"checkpoints/wgrads/iter_{iteration:07}/mp_rank_00_{rank:03}.pth"
            gradients = torch.load(file, weights_only=True)["model_chunk0"]
            for line in (line for line in records(diagnosed, rank) if line["step"] == iteration):
                for expert in range(EXPERTS // 2):
                    prefix = f"{line['module']}.experts.local_experts.{expert}."
                    own = [value for name, value in gradients.items() if name.startswith(prefix)]
                    assert len(own) == 2
                    assert line["zeros"]["elements"][expert] == sum(value.numel() for value in own)
                    assert line["zeros"]["zeros"][expert] == sum(int((value == 0).sum()) for value in own)


@pytest.mark.train
def test_the_last_rank_logs_all_ranks_together(diagnosed: Path) -> None:
    found = diagnostics.read(diagnosed, EXPERTS)
    logged = read_metrics(diagnosed / "attempts/1/metrics.jsonl")
    for step, layers in found.steps.items():
        for name, sample in layers.items():
            assert sample.norms is not None
            high, low = sample.norms.extremes or (0, 0)
            values = logged[step]
            assert values[f"experts/norm_max_over_median_{name}"] == pytest.approx(high)
            assert values[f"experts/norm_min_over_median_{name}"] == pytest.approx(low)
            assert values[f"router/fp32_flips_{name}"] == sample.flips
            assert values[f"router/dropped_{name}"] == 0
            lines = [line for rank in (0, 1) for line in records(diagnosed, rank) if line["step"] == step]
            zeros = sum(sum(line["zeros"]["zeros"]) for line in lines if f"layer_{line['layer']}" == name)
            elements = sum(sum(line["zeros"]["elements"]) for line in lines if f"layer_{line['layer']}" == name)
            assert values[f"experts/zero_wgrads_{name}"] == zeros / elements
    assert not [name for name in logged[1] if name.startswith(MEASURED)]


@pytest.mark.train
def test_training_is_the_same_to_the_last_bit(tmp_path: Path, launch: Callable[..., None]) -> None:
    """With everything that is hooked, under recompute, and with two replicas of the experts over the wire."""
    argv = [*TINY_MOE, *SAVE, *SHARED, *BIAS, *FULL_RECOMPUTE, "--overlap-grad-reduce", *LENGTH]
    losses = []
    for name, env in (("without", {}), ("with", EVERY_SECOND)):
        run_dir = tmp_path / name
        run_dir.mkdir()
        launch(run_dir, argv, env=env)
        metrics = read_metrics(run_dir / "attempts/1/metrics.jsonl")
        losses.append({s: {k: v for k, v in m.items() if not k.startswith(MEASURED)} for s, m in metrics.items()})
    assert losses[0] == losses[1]
    assert len(losses[0]) == 4
    lines = [records(tmp_path / "with", rank) for rank in (0, 1)]
    assert [len(one) for one in lines] == [2 * LAYERS, 2 * LAYERS]
    for one, other in zip(*lines, strict=True):
        assert sum(one["norms"]["rows"]) == sum(other["norms"]["rows"]) == 128 * TOPK
        assert sum(sum(line["zeros"]["elements"]) for line in (one, other)) == EXPERTS * 3 * 64 * 64
    assert all(any(sum(line["zeros"]["elements"]) for line in one) for one in lines)  # each owns a part of the buffer


@pytest.mark.train
def test_stages_that_recompute_and_are_resumed(tmp_path: Path, launch: Callable[..., None]) -> None:
    """PP = 2 with full recompute, with a capacity, in two attempts: the forward's own values, each step once."""
    argv = [*TINY_MOE, *PIPELINE_PARALLEL, *SAVE, *FULL_RECOMPUTE, *DUMPS[:2], *LENGTH, "--global-batch-size", "2"]
    argv += ["--moe-expert-capacity-factor", "1.25"]
    launch(tmp_path, [*argv, "--exit-interval", "2", "--save-interval", "2"], env=EVERY_SECOND)
    launch(tmp_path, [*argv, "--load", "checkpoints"], attempt=2, env=EVERY_SECOND)
    found = diagnostics.read(tmp_path, EXPERTS)
    assert {step: list(layers) for step, layers in found.steps.items()} == {
        2: ["layer_0", "layer_1"],
        4: ["layer_0", "layer_1"],
    }
    for iteration, layers in found.steps.items():
        dump = dumps.read(tmp_path, iteration, dumps.Shape.of(config(tmp_path)))
        assert (dump.refused, dump.skipped) == ({}, [])
        assert list(dump.norms) == ["stage_0_layer_0", "stage_1_layer_0"]
        for sample, norms in zip(layers.values(), dump.norms.values(), strict=True):
            assert sample.norms is not None
            assert sample.norms.rows.tolist() == norms.rows.tolist()
            assert sample.norms.mean == pytest.approx(norms.mean, rel=1e-6, nan_ok=True)
            assert sample.dropped == pytest.approx(1 - int(norms.rows.sum()) / (128 * TOPK))
            assert sample.refused == {"flips": "`moe_expert_capacity_factor` changes what is chosen"}
            assert all(share is not None for share in sample.zeros)


@pytest.mark.train
def test_dropped_assignments_and_what_is_refused(tmp_path: Path, launch: Callable[..., None]) -> None:
    capacity = ["--moe-expert-capacity-factor", "0.5"]
    launch(tmp_path, [*TINY_MOE, *SAVE, *capacity, *LENGTH], env=EVERY_SECOND, ranks=1)
    for line in records(tmp_path, 0):
        kept = sum(line["norms"]["rows"])
        assert line["dropped"] == {"assignments": 256, "dropped": 256 - kept}
        assert kept <= 128
        assert line["flips"] == {"refused": "`moe_expert_capacity_factor` changes what is chosen"}
        assert "shared_over_routed" not in line


@pytest.mark.train
def test_the_bias_of_a_checkpoint_is_what_torch_reads(diagnosed: Path, tmp_path: Path) -> None:
    import shutil

    from torch.distributed import checkpoint

    folder = diagnosed / "checkpoints"
    name = "decoder.layers.mlp.router.expert_bias"
    state = {name: torch.zeros(LAYERS, EXPERTS)}
    checkpoint.load(state, checkpoint_id=folder / "iter_0000004", no_dist=True)
    biases, skipped = bias.read(folder, EXPERTS)
    assert (list(biases), skipped) == ([4], [])
    assert {layer: values.tolist() for layer, values in biases[4].items()} == {
        f"layer_{layer}": state[name][layer].tolist() for layer in range(LAYERS)
    }
    assert bias.spread(biases[4]["layer_0"]) == float(state[name][0].max() - state[name][0].min()) > 0
    copy = tmp_path / "iter_0000004"
    shutil.copytree(folder / copy.name, copy)
    (copy / ".metadata").write_bytes((copy / ".metadata").read_bytes()[:-20])
    assert [one.partition(":")[0] for one in bias.read(tmp_path, EXPERTS)[1]] == ["checkpoint 4"]
    assert bias.read(folder, EXPERTS - 1)[1][0].endswith("has 8 values for 7 experts")


# On a real router, and on a real layer


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """Megatron's process groups on one CPU rank."""
    from megatron.core import parallel_state

    from moekit.job import cuda_on_cpu

    if not torch.cuda.is_available():
        cuda_on_cpu.install()
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/met", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def config_of(**options: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    said = {"num_moe_experts": 16, "moe_router_topk": 4, "moe_router_load_balancing_type": "none", **options}
    return TransformerConfig(
        num_layers=1, hidden_size=32, num_attention_heads=4, add_bias_linear=False, moe_ffn_hidden_size=32, **said
    )


@pytest.fixture
def router_of(one_rank: None) -> Callable[..., Any]:
    """A real TopKRouter, made of options of the transformer's config."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.moe.router import TopKRouter

    def make(**options: Any) -> Any:
        torch.manual_seed(1)
        return TopKRouter(config_of(**options), ProcessGroupCollection.use_mpu_process_groups())

    return make


@pytest.mark.parametrize("gate", [False, True])
def test_both_branches_of_a_real_layer(one_rank: None, gate: bool) -> None:
    """The shared one behind its gate, the routed one combined: together they are the layer's output."""
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(1)
    options = {"moe_shared_expert_intermediate_size": 16, "moe_token_dispatcher_type": "alltoall"}
    settings = config_of(**options, moe_shared_expert_gate=gate)
    make = get_moe_module_spec(use_te=False, num_experts=16, moe_grouped_gemm=False)
    layer = make(settings, layer_number=1, pg_collection=ProcessGroupCollection.use_mpu_process_groups())
    hidden = torch.randn(10, 3, 32)
    sample = samples.Sample(layer, "decoder.layers.0.mlp")
    with ExitStack() as hooked:
        samples._watch_layer(hooked, sample)
        watched = layer(hidden)[0]
    output, shared = layer(hidden)[0].detach(), layer.shared_experts(hidden).detach()
    assert torch.equal(watched, output)
    assert "combine_postprocess" not in vars(layer.token_dispatcher)
    ratios = shared.double().norm(dim=-1) / (output - shared).double().norm(dim=-1)
    found = sample.record["shared_over_routed"]
    assert (found["tokens"], found["zero_routed"]) == (30, 0)
    assert found["sum"] == pytest.approx(float(ratios.sum()), rel=1e-4)
    assert found["largest"] == pytest.approx(float(ratios.max()), rel=1e-4)
    assert sum(sample.record["norms"]["rows"]) == 30 * 4


def flips(router: Any, hidden: Any, mask: Any = None) -> dict[str, Any]:
    chosen = router(hidden, mask)[1]
    return samples.flips(SimpleNamespace(router=router, config=router.config), hidden, mask, chosen)


def test_sets_that_fp32_changes_are_counted(router_of: Callable[..., Any]) -> None:
    router = router_of(moe_router_score_function="sigmoid", num_moe_experts=64)
    router.expert_bias = torch.linspace(-0.002, 0.002, 64)
    router.weight.data = (0.1 + 0.02 * torch.randn(64, 32)).bfloat16()
    hidden = (1 + torch.randn(50, 4, 32)).bfloat16()
    before = torch.backends.cuda.matmul.allow_tf32
    found = flips(router, hidden)
    assert torch.backends.cuda.matmul.allow_tf32 is before
    chosen = router(hidden)[1]
    scores = torch.sigmoid(hidden.reshape(-1, 32).double() @ router.weight.detach().double().T) + router.expert_bias
    exact = torch.zeros_like(chosen).scatter(1, scores.topk(4, dim=1).indices, True)
    expected = int((exact != chosen).any(dim=1).sum())
    assert 10 < expected < 190
    assert found == {"tokens": 200, "flipped": expected}


def test_in_fp32_nothing_flips_and_masked_tokens_are_left_out(router_of: Callable[..., Any]) -> None:
    router = router_of(moe_router_dtype="fp32")
    hidden = torch.randn(50, 4, 32).bfloat16()
    assert flips(router, hidden) == {"tokens": 200, "flipped": 0}
    mask = torch.zeros(50, 4, dtype=torch.bool)
    mask[:20] = True
    assert flips(router, hidden, mask) == {"tokens": 120, "flipped": 0}
    assert flips(router, torch.randn(1000, 4, 32))["tokens"] <= 1024


@pytest.mark.parametrize(
    "options",
    [
        {"moe_router_load_balancing_type": "sinkhorn", "moe_router_topk": 1},
        {"moe_input_jitter_eps": 0.1},
        {"moe_router_force_load_balancing": True},
        {"moe_enable_routing_replay": True},
    ],
)
def test_routing_that_cannot_be_done_again_is_refused(router_of: Callable[..., Any], options: dict[str, Any]) -> None:
    router = router_of()
    router.config = SimpleNamespace(**{**vars(router.config), **options})
    router.routing_type = router.config.moe_router_load_balancing_type
    chosen = torch.zeros(8, 16, dtype=torch.bool)
    with pytest.raises(samples.Refused):
        samples.flips(SimpleNamespace(router=router, config=router.config), torch.randn(8, 1, 32), None, chosen)


# Nothing raises into the training


@pytest.mark.parametrize("broken", ["begin", "log", "write"])
def test_a_diagnosis_that_fails_leaves_the_step_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], broken: str
) -> None:
    training = pytest.importorskip("megatron.training.training")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MOEKIT_ATTEMPT", "1")

    def train_step(model: Any, optimizer: Any, iteration: int | None = None) -> str:
        return f"trained {iteration}"  # and then optimizer.step()

    def fail(*_: Any) -> None:
        raise RuntimeError("a disk, a hook")

    fail.__name__ = broken
    monkeypatch.setattr(training, "train_step", train_step)
    monkeypatch.setattr(diagnose, "is_known", lambda _: True)
    monkeypatch.setattr(diagnose, "begin", lambda *_: [])
    monkeypatch.setattr(diagnose, "log", lambda *_: None)
    monkeypatch.setattr(diagnose.Diary if broken == "write" else diagnose, broken, fail)
    assert diagnose.diagnostic_steps(2) is not None
    assert training.train_step([], None, iteration=0) == "trained 0"
    assert capsys.readouterr().out == ""
    assert training.train_step([], None, iteration=1) == "trained 1"
    assert "RuntimeError: a disk, a hook" in capsys.readouterr().out
    assert training.train_step([], None) == "trained None"


def test_a_train_step_that_is_not_known_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    training = pytest.importorskip("megatron.training.training")
    assert diagnose.is_known(training.train_step)

    def another(model: Any, iteration: int) -> None:
        """One that steps no optimizer."""

    monkeypatch.setattr(training, "train_step", another)
    assert diagnose.diagnostic_steps(2) is None
    assert training.train_step is another


def test_hooks_are_taken_off_again() -> None:
    from moekit.job import zeros

    class Optimizer:
        def step(self) -> str:
            return "stepped"

    optimizer = Optimizer()
    with ExitStack() as hooked:
        zeros.watch(hooked, optimizer, [])
        assert "step" in vars(optimizer)
        assert optimizer.step() == "stepped"
    assert vars(optimizer) == {}


def test_metrics_of_sums() -> None:
    samples = [
        SimpleNamespace(
            record={
                "block": "decoder",
                "layer": 1,
                "experts": [first, first + 1],
                "norms": {"rows": rows, "sum_l2": sums, "width": 4},
                "zeros": {"zeros": [1, 0], "elements": [4, 4]},
                "flips": {"tokens": 8, "flipped": 2},
                "dropped": {"refused": "for a reason"},
            }
        )
        for first, rows, sums in ((0, [2, 1], [2.0, 3.0]), (2, [0, 4], [0.0, 40.0]))
    ]
    per_rank = [diagnose.numbers([sample], 2, 4) for sample in samples]
    total = [sum(values) for values in zip(*per_rank, strict=True)]
    assert diagnose.metrics(total, 2, 4) == {
        "experts/norm_max_over_median_layer_1": 10 / 3,
        "experts/norm_min_over_median_layer_1": 1 / 3,
        "experts/zero_wgrads_layer_1": 2 / 16,
        "router/fp32_flips_layer_1": 4 / 16,
    }
