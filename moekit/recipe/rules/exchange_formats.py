"""Rules on the number formats in which weights are gathered and gradients are summed."""

from __future__ import annotations

from collections.abc import Iterator

from moekit.recipe.rules.violation import Rule, Target, Violation, below
from moekit.recipe.schema import Recipe
from moekit.recipe.sizes import sizes


def gathered_fp8_weights_are_divided(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Only what is divided over ranks is gathered.

    Megatron, validate: `--fp8-param-gather only supported with distributed optimizer, torch fsdp2, megatron fsdp, or
    inference mode` (megatron/training/arguments.py:1061).
    """
    parallel = recipe.parallel
    divided = parallel.use_distributed_optimizer or parallel.use_megatron_fsdp
    if recipe.precision.fp8_param_gather and not divided and "--use-torch-fsdp2" not in (recipe.megatron.extra or ()):
        yield Violation(
            ("precision.fp8_param_gather", "parallel.use_distributed_optimizer"),
            "`precision.fp8_param_gather` needs `parallel.use_distributed_optimizer`",
            "`parallel: {use_distributed_optimizer: true}`",
        )


def gathered_fp8_weights_are_in_fp8(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Weights are kept in FP8 where they are multiplied in it.

    Megatron, config: `fp8_param must be used together with fp8 mode`
    (megatron/core/transformer/transformer_config.py:1440).
    """
    if recipe.precision.fp8_param_gather and not recipe.precision.fp8_format:
        yield Violation(
            ("precision.fp8_param_gather", "precision.fp8_format"),
            "`precision.fp8_param_gather` needs `precision.fp8_format`",
            "unset it with `null` where nothing is in FP8",
        )


def gathered_fp4_weights_are_in_fp4(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Weights are kept in FP4 where they are multiplied in it.

    Megatron, validate: `--fp4-param-gather must be used together with --fp4-format`
    (megatron/training/arguments.py:1070); handbook 4.
    """
    if recipe.precision.fp4_param_gather and not recipe.precision.fp4_format:
        yield Violation(
            ("precision.fp4_param_gather", "precision.fp4_format"),
            "`precision.fp4_param_gather` needs `precision.fp4_format`",
            "unset it with `null` where nothing is in FP4",
        )


def gathered_mxfp8_weights_have_a_buffer(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """MXFP8 weights with their scales do not fit the buffer that other weights are gathered through.

    Megatron, build: Transformer Engine's `replace_raw_data for MXFP8Tensor is not supported yet`
    (megatron/core/distributed/param_and_grad_buffer.py:1278; Transformer Engine 2.16, tensor/utils.py:69).
    """
    precision, parallel = recipe.precision, recipe.parallel
    if (
        (precision.fp8_param_gather and precision.fp8_format and precision.fp8_recipe == "mxfp8")
        and (parallel.use_distributed_optimizer and not parallel.use_megatron_fsdp)
        and not precision.reuse_grad_buf_for_mxfp8_param_ag
    ):
        yield Violation(
            ("precision.fp8_param_gather", "precision.reuse_grad_buf_for_mxfp8_param_ag"),
            "`precision.fp8_param_gather` with `mxfp8` needs `precision.reuse_grad_buf_for_mxfp8_param_ag`",
            "`precision: {reuse_grad_buf_for_mxfp8_param_ag: true}`",
        )


def the_gradients_buffer_gathers_fp8_weights(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """The gradients' buffer is lent to weights that are gathered in FP8. Megatron FSDP has buffers of its own.

    Megatron, config: `Reuse grad buffer only when keeping params in MXFP8`
    (megatron/core/distributed/distributed_data_parallel_config.py:254).
    """
    precision = recipe.precision
    lent = precision.reuse_grad_buf_for_mxfp8_param_ag and not recipe.parallel.use_megatron_fsdp
    if lent and not precision.fp8_param_gather:
        yield Violation(
            ("precision.reuse_grad_buf_for_mxfp8_param_ag", "precision.fp8_param_gather"),
            "`precision.reuse_grad_buf_for_mxfp8_param_ag` needs `precision.fp8_param_gather`",
            "add that, or unset this with `null`",
        )


def fp32_sums_have_fp32_gradients(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Gradients that are summed in fp32 are kept in it.

    Megatron, validate: `--main-grads-dtype can only be fp32 when --accumulate-allreduce-grads-in-fp32 is set`
    (megatron/training/arguments.py:1187).
    """
    precision, grads = recipe.precision, recipe.optimizer.main_grads_dtype
    if precision.bf16 and precision.accumulate_allreduce_grads_in_fp32 and grads not in (None, "fp32"):
        yield Violation(
            ("optimizer.main_grads_dtype", "precision.accumulate_allreduce_grads_in_fp32"),
            f"`main_grads_dtype: {grads}` excludes `precision.accumulate_allreduce_grads_in_fp32`",
            "unset one of them with `null`",
        )


def gradients_are_summed_in_one_format(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A recipe that asks for both sums gets bfloat16's.

    Megatron, never: it switches the sum in fp32 off without a word (megatron/training/arguments.py:1190).
    """
    precision = recipe.precision
    if precision.bf16 and precision.grad_reduce_in_bf16 and precision.accumulate_allreduce_grads_in_fp32:
        yield Violation(
            ("precision.accumulate_allreduce_grads_in_fp32", "precision.grad_reduce_in_bf16"),
            "`precision.accumulate_allreduce_grads_in_fp32` does nothing beside `precision.grad_reduce_in_bf16`",
            "unset one of them with `null`",
        )


def bf16_sums_are_of_bf16_models(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Models in other formats sum gradients in their own.

    Megatron, never: it looks at the wish in bf16 alone (megatron/training/arguments.py:1181-1190).
    """
    if recipe.precision.grad_reduce_in_bf16 and not recipe.precision.bf16:
        yield Violation(
            ("precision.grad_reduce_in_bf16", "precision.bf16"),
            "`precision.grad_reduce_in_bf16` does nothing without `precision.bf16`",
            "unset it with `null`",
        )


def sharded_gradients_are_fused_from_2_10(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Older layers accumulate into a buffer that Megatron FSDP does not have. The fusion is on where nothing is said.

    Megatron, build: `Megatron-FSDP with gradient_accumulation_fusion requires Transformer Engine version 2.10 or
    higher` (megatron/core/distributed/fsdp/mcore_fsdp_adapter.py:148).
    """
    version, fused = target.transformer_engine, not recipe.model.no_gradient_accumulation_fusion
    if recipe.parallel.use_megatron_fsdp and fused and below(version, "2.10"):
        yield Violation(
            ("parallel.use_megatron_fsdp", "model.no_gradient_accumulation_fusion"),
            f"`parallel.use_megatron_fsdp` needs Transformer Engine 2.10; {target.name} has {version}",
            "`model: {no_gradient_accumulation_fusion: true}`",
        )


def sharded_experts_have_copies(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Megatron FSDP reduces sharded gradients after each micro batch, and shards them where nothing is said. Over one
    copy of the experts it reduces in place, and scales again what earlier micro batches have left.

    Megatron, never: an expert's first micro batches count for next to nothing, or for far too much
    (megatron/core/distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py:4071, 4751; Megatron-LM issue 6660).
    """
    parallel, size = recipe.parallel, sizes(recipe)
    strategy = parallel.data_sharding_strategy or "optim_grads_params"
    shards = parallel.use_megatron_fsdp and strategy in ("optim_grads", "optim_grads_params")
    scaled = not recipe.train.calculate_per_token_loss and recipe.megatron.version == "0.19.2"
    if not (shards and scaled and size and recipe.moe.num_experts):
        return
    if size.expert_data == 1 and size.data * size.context > 1 and size.accumulation_steps > 1:
        given = "parallel.data_sharding_strategy" if parallel.data_sharding_strategy else "parallel.use_megatron_fsdp"
        yield Violation(
            (given, "parallel.expert_model", "parallel.gpus"),
            f"`parallel.use_megatron_fsdp` with `{strategy}` scales gradients of experts that have one copy once for "
            f"each of {size.accumulation_steps} micro batches",
            "`parallel: {data_sharding_strategy: optim}`, or fewer ranks for `parallel.expert_model`",
        )


def mxfp8_gradients_are_e4m3(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """MXFP8 scales every 32 values, and its gradients want precision, not the range of E5M2 that `hybrid` gives them.

    Megatron, never: the loss diverges from bfloat16's (NVIDIA's own recipes had it: Megatron-Bridge issue 638).
    A warning: it trains, and small models may not show it.
    """
    precision = recipe.precision
    if precision.fp8_recipe == "mxfp8" and precision.fp8_format == "hybrid":
        yield Violation(
            ("precision.fp8_format", "precision.fp8_recipe"),
            "`precision.fp8_format: hybrid` has MXFP8's gradients in E5M2, and losses diverge",
            "`precision: {fp8_format: e4m3}`",
            "warning",
        )


RULES: tuple[Rule, ...] = (
    gathered_fp8_weights_are_divided,
    gathered_fp8_weights_are_in_fp8,
    gathered_fp4_weights_are_in_fp4,
    gathered_mxfp8_weights_have_a_buffer,
    the_gradients_buffer_gathers_fp8_weights,
    fp32_sums_have_fp32_gradients,
    gradients_are_summed_in_one_format,
    bf16_sums_are_of_bf16_models,
    sharded_gradients_are_fused_from_2_10,
    sharded_experts_have_copies,
    mxfp8_gradients_are_e4m3,
)
