"""A recipe made small keeps its structure, passes the rules, and says everything that it changed."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from moekit import share
from moekit.cluster.profile import Cluster, find_cluster
from moekit.launch.flat import flat_yaml
from moekit.megatron import cpu_limits, step
from moekit.recipe.check import problems_of
from moekit.recipe.load import Loaded, load
from moekit.recipe.schema import Recipe
from moekit.rehearse.edit import changed, value
from moekit.rehearse.instead import FURTHER, INSTEAD
from moekit.rehearse.layers import shortest
from moekit.rehearse.small import Small, for_the_world, for_two, parent
from moekit.rehearse.without import INSTALLED, limits_of

sys.path.insert(0, str(Path(__file__).parents[1] / "differential"))
import generate

Make = Callable[[Recipe], Small]
NAMES = share.shipped_recipes()
EACH = pytest.mark.parametrize("make", [for_the_world, for_two])


@functools.cache
def shipped(make: Make) -> dict[str, tuple[Loaded, Small]]:
    loaded = {name: load(name) for name in NAMES}
    return {name: (one, make(one.recipe)) for name, one in loaded.items()}


def refusals(recipe: Recipe, loaded: Loaded, cluster: Cluster) -> list[str]:
    """What `moekit check` has against a recipe, at the lines of the user's."""
    found = problems_of(Loaded(recipe, loaded.source, loaded.name), cluster)
    return [f"{problem.where}: {problem.what}" for problem in found if problem.level == "error"]


def test_every_limit_has_what_is_said_instead() -> None:
    assert {limit.feature for limit, _ in (*cpu_limits._LIMITS, *FURTHER)} == set(INSTEAD)


def test_whatever_has_no_step_is_taken_out() -> None:
    known = [applies for _, applies in (*cpu_limits._LIMITS, *FURTHER)]
    unknown = [
        dest for dest, _, _ in step._NO_STEP if not any(applies({dest: True}) > applies({}) for applies in known)
    ]
    assert unknown == ["moe_use_upcycling"]  # which two processes can


@EACH
def test_it_passes_the_rules(make: Make) -> None:
    said = {
        name: refusals(small.recipe, loaded, find_cluster(share.made_for(name)))
        for name, (loaded, small) in shipped(make).items()
    }
    assert {name: found for name, found in said.items() if found} == {}


@EACH
def test_nothing_keeps_it_from_a_step(make: Make) -> None:
    for name, (_, small) in shipped(make).items():
        left = [limit.feature for limit in limits_of(small.recipe) if make is for_two or limit.build != "replaced"]
        assert left == [], name
        assert small.recipe.megatron.version == INSTALLED


@EACH
def test_it_says_all_that_it_changed(make: Make) -> None:
    for name, (loaded, small) in shipped(make).items():
        assert changed(loaded.recipe, {change.field: change.value for change in small.changes}) == small.recipe, name
        assert all(value(loaded.recipe, change.field) != change.value for change in small.changes), name


@EACH
def test_what_is_taken_out_says_why(make: Make) -> None:
    for name, (_, small) in shipped(make).items():
        assert [change.field for change in small.changes if change.value is None and not change.why] == [], name
        reasons = " ".join(change.why for change in small.changes)
        taken = [limit.feature for limit in small.not_judged if limit.build != "replaced"]
        assert [feature for feature in taken if feature not in reasons] == [], name


@EACH
def test_it_loads_again(make: Make, tmp_path: Path) -> None:
    for name, (_, small) in shipped(make).items():
        file = tmp_path / "small.yaml"
        file.write_text(flat_yaml(small.recipe))
        assert flat_yaml(load(str(file)).recipe) == flat_yaml(small.recipe), name


STRUCTURE = (
    *("moe.num_experts", "moe.expert_capacity_factor", "moe.dispatcher", "moe.use_upcycling"),
    *("moe.upcycling_granularity", "router.topk", "router.num_groups", "router.group_topk", "router.score_function"),
    *("router.dtype", "balance.type", "balance.aux_loss_coeff", "balance.enable_expert_bias"),
    *("balance.bias_update_rate", "model.mtp_num_layers", "model.softmax_type", "model.position_embedding_type"),
    *(
        "model.stack",
        "model.swiglu",
        "optimizer.name",
        "optimizer.weight_decay",
        "optimizer.clip_grad",
        "checkpoint.save",
    ),
    *("checkpoint.from_run", "schedule.lr", "schedule.decay_style", "schedule.warmup_iters"),
    *("schedule.wsd_decay_iters", "precision.bf16", "precision.grad_reduce_in_bf16", "overlap.grad_reduce"),
    *("overlap.param_gather", "overlap.moe_expert_parallel_comm", "memory.recompute_granularity"),
    *("monitor.routing_trace", "train.seed"),
)


@EACH
def test_the_structure_stays(make: Make) -> None:
    """Unless it is said why not."""
    for name, (loaded, small) in shipped(make).items():
        taken = {change.field for change in small.changes if change.why}
        differ = [field for field in STRUCTURE if value(small.recipe, field) != value(loaded.recipe, field)]
        assert [field for field in differ if field not in taken] == [], name


@EACH
def test_the_learning_rate_is_the_recipes(make: Make) -> None:
    """A run that ends early has the schedule of the whole."""
    for name, (loaded, small) in shipped(make).items():
        whole = loaded.recipe.schedule.decay_iters or loaded.recipe.train.iters
        assert (small.recipe.schedule.decay_iters, small.recipe.train.iters) == (whole, 6), name


def test_the_world_and_its_layout_stay() -> None:
    for name, (loaded, small) in shipped(for_the_world).items():
        for field in ("gpus", "pipeline_model", "expert_model", "use_distributed_optimizer"):
            assert value(small.recipe, f"parallel.{field}") == value(loaded.recipe, f"parallel.{field}"), name
        before, after = (one.parallel.pipeline_model_layout for one in (loaded.recipe, small.recipe))
        assert [re.sub("t+", "t", stage) for stage in (before.stages if before else ())] == (
            [re.sub("t+", "t", stage) for stage in (after.stages if after else ())]
        ), name


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("settings/mtp", {"parallel.pipeline_model_layout": "Et|tmL", "model.num_layers": 2}),
        (
            "models/deepseek_v3_gb200",
            {"parallel.pipeline_model_layout": f"Ett|{'t|' * 14}tmL", "moe.layer_freq": f"[0{',1' * 16}]"},
        ),
        (
            "models/deepseek_v3_h100",
            {"parallel.pipeline_model_layout": f"Et|{'t|' * 30}mL", "moe.layer_freq": f"[0,0{',1' * 29}]"},
        ),
        (
            "models/glm_4_5_air",
            {
                "parallel.decoder_first_pipeline_num_layers": 2,
                "parallel.decoder_last_pipeline_num_layers": 1,
                "moe.layer_freq": "[0,1,1,1,1]",
            },
        ),
        ("models/qwen3_235b_h100", {"model.num_layers": 8 * 4 * 2 - 2}),
        ("settings/offload", {"model.num_layers": 4, "parallel.num_layers_per_virtual_pipeline_stage": 1}),
        ("models/mixtral_8x22b", {"model.num_layers": 8}),
    ],
)
def test_every_stage_of_the_world_keeps_its_kinds_of_layer(name: str, said: dict[str, object]) -> None:
    recipe = shipped(for_the_world)[name][1].recipe
    found = {field: value(recipe, field) for field in said}
    assert {field: str(at) if hasattr(at, "parse") else at for field, at in found.items()} == said


def test_two_processes_share_the_most_telling_part_of_the_layout() -> None:
    for name, (loaded, small) in shipped(for_two).items():
        ranks = ("expert_model", "pipeline_model", "tensor_model", "context")
        given = [value(loaded.recipe, f"parallel.{field}") or 1 for field in ranks]
        kept = next((field for field, size in zip(ranks[:3], given, strict=False) if size > 1), None)
        assert small.recipe.parallel.gpus == 2
        for field in ranks:
            assert (value(small.recipe, f"parallel.{field}") or 1) == (2 if field == kept else 1), (name, field)


@pytest.mark.parametrize(
    ("name", "layers", "pattern"),
    [
        ("first_moe", 2, None),
        ("settings/layout_dense_first", 2, "[0,1]"),
        ("settings/layout_alternating", 3, "[0,1,0]"),
        ("models/deepseek_v3_h100", 2, "[0,1]"),
    ],
)
def test_two_processes_have_every_kind_of_layer(name: str, layers: int, pattern: str | None) -> None:
    recipe = shipped(for_two)[name][1].recipe
    found = recipe.moe.layer_freq
    assert (recipe.model.num_layers, found and found.text) == (layers, pattern)


def test_two_processes_have_every_kind_of_part_of_a_stack() -> None:
    for name in ("settings/hybrid", "settings/shortcut"):
        recipe = shipped(for_two)[name][1].recipe
        assert (str(recipe.model.hybrid_layer_pattern), recipe.model.num_layers) == ("*E*", 3)


SHARED = {
    "pipeline": ({"pipeline_model": 4, "num_virtual_stages_per_pipeline_rank": 2}, ("pipeline_model", 2)),
    "tensor": ({"tensor_model": 4, "sequence": True}, ("tensor_model", 2)),
}


@pytest.mark.parametrize("kind", SHARED)
def test_two_processes_share_what_a_dense_model_divides(kind: str) -> None:
    said, (field, ranks) = SHARED[kind]
    recipe = changed(load("dense").recipe, {f"parallel.{name}": to for name, to in {"gpus": 16, **said}.items()})
    small = for_two(recipe).recipe
    assert refusals(small, load("dense"), find_cluster()) == []
    assert value(small, f"parallel.{field}") == ranks
    if kind == "pipeline":  # still interleaved, as many micro batches as stages
        assert (small.parallel.num_virtual_stages_per_pipeline_rank, small.model.num_layers) == (2, 4)
        assert small.train.global_batch_size == 2 * (small.train.micro_batch_size or 0)
    else:  # Megatron asks for it where a tensor is divided
        assert small.runtime.environment == {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}


@pytest.mark.parametrize(
    ("kinds", "kept"),
    [("aaa", "a"), ("abbbb", "ab"), ("abababab", "aba"), ("aabbcc", "abc"), ("abcabc", "abca"), ("*E*E*E", "*E*")],
)
def test_a_row_of_layers_keeps_every_kind_and_every_change(kinds: str, kept: str) -> None:
    assert "".join(shortest(kinds)) == kept


def test_a_run_that_begins_from_another_has_a_parent() -> None:
    having = {name for name in NAMES if parent(load(name).recipe)}
    assert having == {name for name in NAMES if load(name).recipe.checkpoint.from_run}
    assert {"upcycle", "settings/dense_continued"} <= having


def test_the_parent_of_an_upcycled_run_is_dense_and_as_wide_as_all_slices() -> None:
    loaded = load("upcycle")
    child, made = for_two(loaded.recipe).recipe, parent(loaded.recipe)
    assert made
    assert refusals(made.recipe, loaded, find_cluster()) == []
    assert made.recipe.moe.num_experts is None
    assert child.model.ffn_hidden_size
    assert made.recipe.model.ffn_hidden_size == child.model.ffn_hidden_size * 8
    for field in ("model.num_layers", "model.hidden_size", "model.num_attention_heads", "data.vocab_size"):
        assert value(made.recipe, field) == value(child, field)


def test_random_recipes_that_are_right_are_right_when_small() -> None:
    right, wrong = 0, []
    for case in generate.cases(seed=7, count=600):
        loaded, cluster = generate.loaded(case.values), generate.cluster(case.profile)
        if loaded.problems:
            continue
        smalls = [make(loaded.recipe) for make in (for_the_world, for_two, parent)]  # whatever is wrong, none stops
        if refusals(loaded.recipe, loaded, cluster):
            continue
        for small in filter(None, smalls):
            right += 1
            if found := refusals(small.recipe, loaded, cluster):
                wrong.append((case.seed, case.changes, found))
    assert wrong == []
    assert right > 200
