"""Rules on what stands beside the routed experts: a shared one, hash layers and their table."""

from __future__ import annotations

from collections.abc import Iterator

from moekit.problems import shortened
from moekit.recipe.names import RUN_NAME
from moekit.recipe.rules.violation import Rule, Target, Violation, below
from moekit.recipe.schema import Recipe


def a_shared_expert_divides_over_tensor_ranks(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """It is cut as dense layers are, over the tensor-parallel ranks.

    Megatron, build: `65 is not divisible by 2` (megatron/core/utils.py:558).
    """
    width, ranks = recipe.moe.shared_expert_intermediate_size, recipe.parallel.tensor_model or 1
    if recipe.moe.num_experts and width and width % ranks:
        yield Violation(
            ("moe.shared_expert_intermediate_size", "parallel.tensor_model"),
            f"a shared expert of width {width} cannot be cut over parallel.tensor_model = {ranks} ranks",
            f"use a multiple of {ranks}",
        )


def a_shared_expert_has_no_bias(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Linear layers have a bias unless told otherwise.

    Megatron, build: `bias is not supported in the shared experts`
    (megatron/core/transformer/moe/shared_experts.py:124).
    """
    moe = recipe.moe
    if moe.num_experts and moe.shared_expert_intermediate_size and not recipe.model.disable_bias_linear:
        yield Violation(
            ("moe.shared_expert_intermediate_size", "model.disable_bias_linear"),
            "a shared expert cannot have a bias, and linear layers have one by default",
            "add `disable_bias_linear: true` to `model`",
        )


def a_shared_expert_overlaps_an_exchange(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """The default dispatcher, `allgather`, has no exchange to run it behind.

    Megatron, config: `moe_shared_expert_overlap only works with alltoall or flex token dispatcher`
    (megatron/core/transformer/transformer_config.py:1648).
    """
    moe = recipe.moe
    overlaps = moe.num_experts and moe.shared_expert_intermediate_size and moe.shared_expert_overlap
    if overlaps and moe.dispatcher in (None, "allgather"):
        yield Violation(
            ("moe.shared_expert_overlap", "moe.dispatcher"),
            "`moe.shared_expert_overlap` needs `moe.dispatcher` alltoall or flex, and not allgather, the default",
            "add `dispatcher: alltoall`",
        )


def a_shared_expert_waits_for_latent_experts(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """The dispatcher sees tokens of the latent width, the shared expert needs whole ones.

    Megatron, first step: `Shared expert overlap with MoE latent projections is not supported during training`
    (megatron/core/transformer/moe/moe_layer.py:472).
    """
    moe = recipe.moe
    if moe.num_experts and moe.latent_size and moe.shared_expert_intermediate_size and moe.shared_expert_overlap:
        yield Violation(
            ("moe.shared_expert_overlap", "moe.latent_size"),
            "`moe.shared_expert_overlap` does not go with `moe.latent_size`",
            "unset it with `null`",
        )


def _fused_shared_expert(recipe: Recipe) -> bool:
    moe = recipe.moe
    fused = moe.use_grouped_gemm_for_shared_expert and moe.shared_expert_intermediate_size
    return bool(moe.num_experts and fused)


def a_fused_shared_expert_needs_its_kernel(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """The grouped kernel for a shared expert came with Transformer Engine 2.14.

    Megatron, build: `FusedSharedExpertMLP requires Transformer Engine >= 2.14.0`
    (megatron/core/transformer/moe/shared_experts.py:397).
    """
    if _fused_shared_expert(recipe) and below(target.transformer_engine, "2.14.0"):
        yield Violation(
            ("moe.use_grouped_gemm_for_shared_expert",),
            "`moe.use_grouped_gemm_for_shared_expert` needs Transformer Engine 2.14 or later, and "
            f"{target.name} has {target.transformer_engine}",
        )


def a_fused_shared_expert_is_a_swiglu(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Its kernel knows one activation.

    Megatron, build: `FusedSharedExpertMLP requires SwiGLU activation`
    (megatron/core/transformer/moe/shared_experts.py:408).
    """
    if _fused_shared_expert(recipe) and not recipe.model.swiglu:
        yield Violation(
            ("moe.use_grouped_gemm_for_shared_expert", "model.swiglu"),
            "`moe.use_grouped_gemm_for_shared_expert` needs `model.swiglu`",
            "add `swiglu: true` to `model`, or unset this with `null`",
        )


def a_fused_shared_expert_is_interleaved(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Its kernel reads gate and input in turns of some columns.

    Megatron, build: `requires moe_shared_expert_glu_interleave_size to be set`
    (megatron/core/transformer/moe/shared_experts.py:416).
    """
    option = "--moe-shared-expert-glu-interleave-size"
    if _fused_shared_expert(recipe) and option not in (recipe.megatron.extra or ()):
        yield Violation(
            ("moe.use_grouped_gemm_for_shared_expert", "megatron.extra"),
            f"`moe.use_grouped_gemm_for_shared_expert` needs `{option}`, which no field says",
            f"add `[{option}, 32]` to `megatron.extra`",
        )


def a_fused_shared_expert_is_in_a_narrow_format(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Its kernel is MXFP8's and NVFP4's, which is FP4's default recipe.

    Megatron, first step: `FusedSharedExpertMLP requires fp4_recipe='nvfp4' or fp8_recipe='mxfp8'`
    (megatron/core/transformer/moe/shared_experts.py:438).
    """
    precision = recipe.precision
    mxfp8 = precision.fp8_format and precision.fp8_recipe == "mxfp8"
    nvfp4 = precision.fp4_format and precision.fp4_recipe in (None, "nvfp4")
    if _fused_shared_expert(recipe) and not (mxfp8 or nvfp4 or below(target.transformer_engine, "2.14.0")):
        yield Violation(
            ("moe.use_grouped_gemm_for_shared_expert", "precision.fp8_recipe"),
            "`moe.use_grouped_gemm_for_shared_expert` needs MXFP8 or NVFP4 (`precision.fp8_recipe: mxfp8`)",
            "unset it with `null` on GPUs before Blackwell",
        )


def hash_layers_have_a_table(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Without a loaded table tokens go round the experts by their ids, and nothing balances it later.

    A warning: it trains, and a table may come in another way. Only the handbook's commit has hash layers.

    Megatron, never: it fills a placeholder in, in turns (handbook 3.2).
    """
    layers = recipe.moe.num_hash_layers
    if recipe.moe.num_experts and layers and not recipe.checkpoint.from_run and not recipe.moe.hash_table:
        yield Violation(
            ("moe.num_hash_layers", "moe.hash_table"),
            f"{layers} hash layers begin without a table of token ids: Megatron's placeholder sends them in turns",
            "`moekit data hash-table` makes one, for `moe.hash_table`; or begin from a checkpoint that has one",
            "warning",
        )


def a_hash_table_is_for_hash_layers(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Only hash layers read a table.

    Megatron, never: a job refuses a table that has no place (moekit/job/hash_table.py).
    """
    if recipe.moe.hash_table and not recipe.moe.num_hash_layers:
        yield Violation(
            ("moe.hash_table", "moe.num_hash_layers"),
            "`moe.hash_table` does nothing without `moe.num_hash_layers`",
            "say how many of the first layers are hash layers, or unset it with `null`",
        )


def a_hash_table_lies_with_its_data(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A table is of a data set, whose tokens it was balanced by, and is named in it.

    Megatron, never: the launch finds no file (moekit/launch/rundir.py).
    """
    table = recipe.moe.hash_table
    if table is not None and not recipe.data.name:
        yield Violation(
            ("moe.hash_table", "data.name"),
            "`moe.hash_table` needs `data.name`: a table lies with the data whose tokens were counted",
            "name the data set, or unset it with `null`",
        )
    elif table is not None and not RUN_NAME.fullmatch(table):
        yield Violation(
            ("moe.hash_table",),
            f"no table can be named `{shortened(table)}`",
            "`moe.hash_table` is the name that `moekit data hash-table` says",
        )


def a_checkpoint_brings_its_hash_table(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A table is part of a checkpoint, and its experts were trained with it. A warning: it is the right one.

    Megatron, never: what it loads comes after what a model began with (megatron/training/training.py:2105).
    """
    if recipe.moe.hash_table and recipe.checkpoint.from_run and not recipe.moe.use_upcycling:
        yield Violation(
            ("moe.hash_table", "checkpoint.from_run"),
            f"`moe.hash_table` is not used: the checkpoint of `{shortened(recipe.checkpoint.from_run)}` has its own",
            "unset it with `null`",
            "warning",
        )


RULES: tuple[Rule, ...] = (
    a_shared_expert_divides_over_tensor_ranks,
    a_shared_expert_has_no_bias,
    a_shared_expert_overlaps_an_exchange,
    a_shared_expert_waits_for_latent_experts,
    a_fused_shared_expert_needs_its_kernel,
    a_fused_shared_expert_is_a_swiglu,
    a_fused_shared_expert_is_interleaved,
    a_fused_shared_expert_is_in_a_narrow_format,
    hash_layers_have_a_table,
    a_hash_table_is_for_hash_layers,
    a_hash_table_lies_with_its_data,
    a_checkpoint_brings_its_hash_table,
)
