"""Rules on the optimizer and its state."""

from __future__ import annotations

from collections.abc import Iterator

from moekit.recipe.rules.muon import is_muon
from moekit.recipe.rules.violation import Rule, Target, Violation, below
from moekit.recipe.schema import Recipe


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
    others = [] if is_muon(recipe) else of_muon
    for field in [*others, *(of_adam if name == "sgd" else [])]:
        if getattr(optimizer, field) is not None:
            yield Violation(
                (f"optimizer.{field}", "optimizer.name"),
                f"`optimizer.{field}` does nothing with `optimizer.name: {name}`",
                "unset it with `null`",
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


AWARE = "optimizer.use_precision_aware_optimizer"


def state_formats_keep_a_weight_to_step(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Where the optimizer keeps the only precise weights itself, it needs the model's to begin from: none are left of
    those gathered in FP8, delayed scaling's apart, or in FP4.

    Megatron, first step: `'NoneType' object has no attribute 'nelement'`, or an error of the optimizer's constructor
    (megatron/core/optimizer/distrib_optimizer.py:405-446, 2770; Megatron-LM issue 5083).
    """
    optimizer, precision, name = recipe.optimizer, recipe.precision, recipe.optimizer.main_params_dtype
    if not optimizer.use_precision_aware_optimizer or recipe.parallel.use_megatron_fsdp:
        return
    delayed = precision.fp8_recipe in (None, "delayed")
    if precision.fp4_param_gather and (delayed or name not in (None, "fp32") or optimizer.cpu_offload):
        yield Violation(
            (AWARE, "precision.fp4_param_gather"),
            f"`{AWARE}` excludes `precision.fp4_param_gather`",
            "unset one of them with `null`",
        )
    elif precision.fp8_param_gather and not delayed and name not in (None, "fp32") and not optimizer.cpu_offload:
        yield Violation(
            ("optimizer.main_params_dtype", "precision.fp8_param_gather", "precision.fp8_recipe"),
            f"`main_params_dtype: {name}` excludes `precision.fp8_param_gather` with `{precision.fp8_recipe}`",
            "`optimizer: {main_params_dtype: fp32}`, or unset `precision.fp8_param_gather` with `null`",
        )


def state_on_the_host_is_saved_whole(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A host's Adam counts its steps, and corrects its averages by them.

    Megatron, never: from a checkpoint that is not fully reshardable, its default, the count begins anew, and a
    restart's first steps are too large or too small (megatron/core/optimizer/distrib_optimizer.py:1953, 2093, where
    2108 leaves the count alone; SkyRL pull request 1403).
    A warning: until a restart it trains, and the averages outgrow it.
    """
    optimizer, checkpoint = recipe.optimizer, recipe.checkpoint
    offloads = optimizer.cpu_offload and optimizer.use_precision_aware_optimizer and not recipe.benchmark
    saves = checkpoint.save and not checkpoint.no_save_optim and checkpoint.format in (None, "torch_dist")
    if offloads and saves and not checkpoint.dist_optim_fully_reshardable:
        yield Violation(
            ("optimizer.cpu_offload", "checkpoint.dist_optim_fully_reshardable"),
            "a restart counts the steps of `optimizer.cpu_offload` from 0 again",
            "`checkpoint: {dist_optim_fully_reshardable: true}`",
            "warning",
        )


RULES: tuple[Rule, ...] = (
    plain_descent_keeps_its_state_whole,
    adams_averages_forget,
    settings_are_of_the_optimizer,
    state_formats_are_a_divided_adams,
    state_formats_find_their_version,
    state_is_in_fp32_unless_said,
    state_on_the_host_is_precision_aware,
    state_on_the_host_gathers_delayed_fp8,
    offloaded_state_is_a_share,
    state_formats_keep_a_weight_to_step,
    state_on_the_host_is_saved_whole,
)
