"""Rules on the optimizer and its state."""

from __future__ import annotations

from collections.abc import Iterator

from moekit.recipe.rules.violation import Rule, Target, Violation, below
from moekit.recipe.schema import Recipe


def sharded_training_has_a_common_optimizer(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Megatron FSDP divides matrices, which Muon and its kin need whole.

    Megatron, validate: `Megatron-FSDP does not support the muon optimizer yet` (megatron/training/arguments.py:1127);
    handbook 3.6.
    """
    if recipe.parallel.use_megatron_fsdp and _is_emerging(recipe):
        yield Violation(
            ("optimizer.name", "parallel.use_megatron_fsdp"),
            f"`optimizer.name: {recipe.optimizer.name}` excludes `parallel.use_megatron_fsdp`",
            "`parallel: {use_megatron_fsdp: null, use_distributed_optimizer: true}`",
        )


def emerging_optimizers_are_not_of_fp16(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A loss scale would change what they orthogonalize.

    Megatron, first step: `emerging optimizer with fp16 is not supported` (megatron/core/optimizer/__init__.py:770).
    """
    if _is_emerging(recipe) and recipe.precision.fp16:
        yield Violation(
            ("optimizer.name", "precision.fp16"),
            f"`optimizer.name: {recipe.optimizer.name}` excludes `precision.fp16`",
            "`precision: {fp16: null, bf16: true}`",
        )


def layer_wise_state_has_one_instance(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Whole matrices are dealt out over all data-parallel ranks: there are no instances among them.

    Megatron, first step: `LayerWiseDistributedOptimizer does not support num_distributed_optimizer_instances > 1`
    (megatron/core/optimizer/layer_wise_optimizer.py:464).
    """
    instances = recipe.parallel.num_distributed_optimizer_instances or 1
    if _is_layer_wise(recipe) and instances > 1:
        yield Violation(
            ("parallel.num_distributed_optimizer_instances", "optimizer.name"),
            f"`optimizer.name: {recipe.optimizer.name}` has one instance, not {instances}",
            "unset it with `null`",
        )


def layer_wise_state_is_of_bf16(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Whole matrices are dealt out to an optimizer that keeps fp32 copies of bfloat16 weights; of fp32 it makes none.

    Megatron, first step: `'TensorParallelMuon' object has no attribute 'get_loss_scale'`
    (megatron/core/optimizer/optimizer.py:1490; seen on a CPU).
    """
    if _is_layer_wise(recipe) and not (recipe.precision.bf16 or recipe.precision.fp16):
        yield Violation(
            ("optimizer.name", "precision.bf16", "parallel.use_distributed_optimizer"),
            f"`optimizer.name: {recipe.optimizer.name}` over divided state needs `precision.bf16`",
            "`precision: {bf16: true}`",
        )


def plain_descent_keeps_its_state_whole(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """The state of SGD cannot be divided: it has none that a checkpoint could show.

    Megatron, first step: `Only Adam, HybridDeviceOptimizer, and optimizers with an init_state_fn (e.g., Lion) are
    currently supported, due to checkpointing requirements` (megatron/core/optimizer/distrib_optimizer.py:688).
    """
    parallel = recipe.parallel
    if recipe.optimizer.name == "sgd" and (parallel.use_distributed_optimizer or parallel.use_megatron_fsdp):
        yield Violation(
            ("optimizer.name", "parallel.use_distributed_optimizer"),
            "`optimizer.name: sgd` excludes `parallel.use_distributed_optimizer`",
            "`parallel: {use_distributed_optimizer: null}`, and `overlap: {param_gather: null}` with it",
        )


def adams_averages_forget(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A moment with a factor of 1 never takes in a gradient, and its correction divides by 0.

    Megatron, first step: torch's `Invalid beta parameter at index 0: 1.0`; Transformer Engine's Adam says nothing, and
    all weights are NaN (megatron/core/optimizer/__init__.py:546; seen on a CPU).
    """
    for name in ("adam_beta1", "adam_beta2"):
        value = getattr(recipe.optimizer, name)
        if value is not None and value >= 1 and recipe.optimizer.name != "sgd":
            yield Violation((f"optimizer.{name}",), f"`optimizer.{name}` is {value:g}", "below 1, such as 0.95")


def settings_are_of_the_optimizer(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Another optimizer's settings change nothing. Muon hands what is no matrix to Adam, so Adam's are its own too.

    Megatron, never: it reads the settings of the optimizer that it builds (megatron/core/optimizer/__init__.py:545).
    """
    optimizer, name = recipe.optimizer, recipe.optimizer.name or "adam"
    of_muon = [field for field in vars(type(optimizer)) if field.startswith("muon_")]
    of_adam = ["adam_beta1", "adam_beta2", "adam_eps"]
    others = [] if name in ("muon", "dist_muon", "adaptive_muon") else of_muon
    for field in [*others, *(of_adam if name == "sgd" else [])]:
        if getattr(optimizer, field) is not None:
            yield Violation(
                (f"optimizer.{field}", "optimizer.name"),
                f"`optimizer.{field}` does nothing with `optimizer.name: {name}`",
                "unset it with `null`",
            )


def muon_starts_from_a_small_scale(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Megatron's own scale of 1 is five times what held. A warning: it is what Megatron documents.

    Megatron, never: the loss diverges (a dense 7B in Mellum2's trials; handbook 3.6).
    """
    scale = recipe.optimizer.muon_extra_scale_factor
    if recipe.optimizer.name in ("muon", "dist_muon") and (scale is None or scale >= 1):
        yield Violation(
            ("optimizer.muon_extra_scale_factor", "optimizer.name"),
            f"Muon with a scale of {1 if scale is None else scale:g} has diverged",
            "`optimizer: {muon_extra_scale_factor: 0.2}` (handbook 3.6)",
            level="warning",
        )


def a_router_skips_muon_where_it_is(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Other optimizers have one way for all weights. A warning: nothing else is trained than was meant.

    Megatron, never: it marks the router's weights for Muon alone (megatron/core/transformer/moe/router.py of the
    handbook's commit; handbook 3.6).
    """
    muon = recipe.optimizer.name in ("muon", "dist_muon", "adaptive_muon")
    if recipe.router.skip_muon and not muon:
        yield Violation(
            ("router.skip_muon", "optimizer.name"),
            "`router.skip_muon` does nothing without Muon",
            "`optimizer: {name: muon}`, or unset it with `null`",
            level="warning",
        )


def state_formats_are_a_divided_adams(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Only the distributed Adam keeps its state in other formats. Muon's state is divided otherwise.

    Megatron, config: `--use-precision-aware-optimizer only supported with adam`, `... with distributed optimizer`
    (megatron/core/optimizer/optimizer_config.py:431, 434).
    """
    parallel, name = recipe.parallel, recipe.optimizer.name
    if not recipe.optimizer.use_precision_aware_optimizer:
        return
    if name not in (None, "adam"):
        yield Violation((AWARE, "optimizer.name"), f"`{AWARE}` needs `optimizer.name: adam`", "unset it with `null`")
    elif not (parallel.use_distributed_optimizer or parallel.use_megatron_fsdp):
        yield Violation(
            (AWARE, "parallel.use_distributed_optimizer"),
            f"`{AWARE}` needs `parallel.use_distributed_optimizer`",
            "`parallel: {use_distributed_optimizer: true}`",
        )


def state_formats_find_their_version(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Transformer Engine's Adam has formats since 1.13. Where state lies on the host another Adam has them.

    Megatron, config: `Current FusedAdam of TE doesn't support --use-precision-aware-optimizer`
    (megatron/core/optimizer/optimizer_config.py:460).
    """
    optimizer, version = recipe.optimizer, target.transformer_engine
    if optimizer.use_precision_aware_optimizer and not optimizer.cpu_offload and below(version, "1.13"):
        yield Violation((AWARE,), f"`{AWARE}` needs Transformer Engine 1.13; {target.name} has {version}", "use fp32")


def state_is_in_fp32_unless_said(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Other formats of the state need the optimizer that knows of them.

    Megatron, config: `main_grads_dtype can only be fp32 when not using precision-aware optimizer`, the same of the
    others (megatron/core/optimizer/optimizer_config.py:470-481).
    """
    for name in ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
        value = getattr(recipe.optimizer, name)
        if value not in (None, "fp32") and not recipe.optimizer.use_precision_aware_optimizer:
            yield Violation(
                (f"optimizer.{name}", AWARE),
                f"`{name}: {value}` needs `{AWARE}`",
                "add that, or unset this with `null`",
            )


def state_on_the_host_is_precision_aware(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """The optimizer of two devices uses the code of the precision-aware one.

    Megatron, validate: `The optimizer cpu offload must be used in conjunction with --use-precision-aware-optimizer`
    (megatron/training/arguments.py:1804).
    """
    if recipe.optimizer.cpu_offload and not recipe.optimizer.use_precision_aware_optimizer:
        yield Violation(
            ("optimizer.cpu_offload", AWARE),
            f"`optimizer.cpu_offload` needs `{AWARE}`",
            "`optimizer: {use_precision_aware_optimizer: true}`",
        )


def state_on_the_host_gathers_delayed_fp8(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """On the host, weights are only cast to FP8 with delayed scaling, which is Megatron's recipe where none is said.

    Megatron, validate: `When --fp8-param-gather is enabled, the optimizer cpu offload must be used in conjunction with
    --fp8-recipe delayed` (megatron/training/arguments.py:1808).
    """
    precision = recipe.precision
    offloads = recipe.optimizer.cpu_offload and recipe.optimizer.use_precision_aware_optimizer
    if offloads and precision.fp8_param_gather and precision.fp8_recipe not in (None, "delayed"):
        yield Violation(
            ("optimizer.cpu_offload", "precision.fp8_param_gather", "precision.fp8_recipe"),
            f"`optimizer.cpu_offload` with `precision.fp8_param_gather` needs `fp8_recipe: delayed`, not "
            f"`{precision.fp8_recipe}`",
            "unset `precision.fp8_param_gather` with `null`",
        )


def offloaded_state_is_a_share(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """More than all of the state cannot move. A warning: all of it does, which may be what was meant.

    Megatron, never: it takes state until the share is reached
    (megatron/core/optimizer/cpu_offloading/hybrid_optimizer.py).
    """
    share = recipe.optimizer.offload_fraction
    if recipe.optimizer.cpu_offload and share is not None and share > 1:
        yield Violation(
            ("optimizer.offload_fraction",),
            f"`optimizer.offload_fraction` is {share:g}, more than all",
            "a share from 0 to 1",
            level="warning",
        )


def _is_emerging(recipe: Recipe) -> bool:
    """Whether the optimizer is of the package emerging_optimizers (megatron/training/arguments.py:1671)."""
    return recipe.optimizer.name not in (None, "adam", "sgd")


def _is_layer_wise(recipe: Recipe) -> bool:
    """Whether Megatron deals out whole matrices instead of dividing state (megatron/training/arguments.py:1672)."""
    divided = recipe.parallel.use_distributed_optimizer or recipe.optimizer.name == "dist_muon"
    return _is_emerging(recipe) and bool(divided)


AWARE = "optimizer.use_precision_aware_optimizer"


RULES: tuple[Rule, ...] = (
    sharded_training_has_a_common_optimizer,
    emerging_optimizers_are_not_of_fp16,
    layer_wise_state_has_one_instance,
    layer_wise_state_is_of_bf16,
    plain_descent_keeps_its_state_whole,
    adams_averages_forget,
    settings_are_of_the_optimizer,
    muon_starts_from_a_small_scale,
    a_router_skips_muon_where_it_is,
    state_formats_are_a_divided_adams,
    state_formats_find_their_version,
    state_is_in_fp32_unless_said,
    state_on_the_host_is_precision_aware,
    state_on_the_host_gathers_delayed_fp8,
    offloaded_state_is_a_share,
)
