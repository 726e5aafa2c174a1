"""Rules on how tokens reach their experts: dispatcher and its library, capacity, the experts' grouped kernels."""

from __future__ import annotations

from collections.abc import Iterator

from moekit.recipe.rules.violation import Rule, Target, Violation, is_blackwell
from moekit.recipe.schema import Recipe
from moekit.recipe.sizes import exchange_ranks

_WITH_CAPACITY = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none")


def flex_library(recipe: Recipe) -> str:
    """The library that carries the flex dispatcher's tokens."""
    return "deepep" if recipe.moe.enable_deepep else recipe.moe.flex_dispatcher_backend or "deepep"


def _backend(recipe: Recipe) -> str | None:
    """The library that carries tokens; None where the dispatcher asks for none (default `allgather`)."""
    return flex_library(recipe) if recipe.moe.dispatcher == "flex" else None


def deepep_rides_on_the_flex_dispatcher(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """The default dispatcher is `allgather`, which carries tokens itself.

    Megatron, config: `DeepEP backend is only supported with flex token dispatcher`
    (megatron/core/transformer/transformer_config.py:1591).
    """
    moe = recipe.moe
    if moe.num_experts and moe.enable_deepep and moe.dispatcher != "flex":
        yield Violation(
            ("moe.enable_deepep", "moe.dispatcher"),
            f"`moe.enable_deepep` needs `moe.dispatcher: flex`, not {moe.dispatcher or 'allgather, the default'}",
            "add `dispatcher: flex`, or unset this with `null`",
        )


def deepep_shares_with_no_other_library(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """One library carries the tokens; `enable_deepep` is the older way to choose it.

    Megatron, config: `Only one backend is supported for flex token dispatcher`
    (megatron/core/transformer/transformer_config.py:1593).
    """
    moe = recipe.moe
    if moe.num_experts and moe.enable_deepep and moe.dispatcher == "flex" and moe.flex_dispatcher_backend == "hybridep":
        yield Violation(
            ("moe.enable_deepep", "moe.flex_dispatcher_backend"),
            "`moe.enable_deepep` and `moe.flex_dispatcher_backend: hybridep` ask for two libraries",
            "unset `enable_deepep` with `null`; `flex_dispatcher_backend: deepep` says the same",
        )


def deepep_displaces_no_other_library(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """`enable_deepep` wins over `ncclep`, which was asked for.

    Megatron, never: DeepEP carries the tokens (megatron/core/transformer/transformer_config.py:1594).
    """
    moe = recipe.moe
    if moe.num_experts and moe.enable_deepep and moe.dispatcher == "flex" and moe.flex_dispatcher_backend == "ncclep":
        yield Violation(
            ("moe.enable_deepep", "moe.flex_dispatcher_backend"),
            "`moe.enable_deepep` takes the place of `moe.flex_dispatcher_backend: ncclep` without a word",
            "unset `enable_deepep` with `null`",
        )


def ncclep_rides_on_the_flex_dispatcher(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """The default dispatcher is `allgather`, which carries tokens itself.

    Megatron, config: `moe_flex_dispatcher_backend='ncclep' requires moe_token_dispatcher_type='flex'`
    (megatron/core/transformer/transformer_config.py:1611).
    """
    moe = recipe.moe
    if moe.num_experts and moe.flex_dispatcher_backend == "ncclep" and moe.dispatcher != "flex":
        yield Violation(
            ("moe.flex_dispatcher_backend", "moe.dispatcher"),
            "`moe.flex_dispatcher_backend: ncclep` needs `moe.dispatcher: flex`, not "
            f"{moe.dispatcher or 'allgather, the default'}",
            "add `dispatcher: flex`, or unset this with `null`",
        )


def a_library_rides_on_the_flex_dispatcher(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """The other dispatchers carry tokens themselves.

    Megatron, never: it carries them so (megatron/core/transformer/moe/moe_layer.py:297).
    """
    moe = recipe.moe
    if moe.num_experts and moe.flex_dispatcher_backend in ("deepep", "hybridep") and moe.dispatcher != "flex":
        yield Violation(
            ("moe.flex_dispatcher_backend", "moe.dispatcher"),
            "`moe.flex_dispatcher_backend` does nothing without `moe.dispatcher: flex`",
            "add `dispatcher: flex`, or unset this with `null`",
        )


def libraries_have_ranks_to_reach(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """DeepEP and NCCL EP carry tokens between ranks and need two at least.

    Megatron, build: `DeepEP dispatcher requires TPxEP > 1`
    (megatron/core/transformer/moe/token_dispatcher.py:1770, 1788).
    """
    backend = _backend(recipe)
    if recipe.moe.num_experts and backend in ("deepep", "ncclep") and exchange_ranks(recipe) == 1:
        yield Violation(
            ("moe.dispatcher", "parallel.expert_model", "parallel.expert_tensor"),
            f"`moe.dispatcher: flex` with {backend} needs experts on more than one rank",
            "raise `parallel.expert_model`, or use `dispatcher: alltoall`",
        )


def one_number_of_sms_is_given(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Both fields set the same number, whichever library carries the tokens.

    Megatron, config: `Conflicting deprecated SM-count knobs` (megatron/core/transformer/transformer_config.py:1631).
    """
    moe, extra = recipe.moe, recipe.megatron.extra or ()
    given = {moe.deepep_num_sms, moe.hybridep_num_sms} - {None}
    if moe.num_experts and len(given) > 1 and "--moe-flex-dispatcher-num-sms" not in extra:
        yield Violation(
            ("moe.deepep_num_sms", "moe.hybridep_num_sms"),
            f"moe.deepep_num_sms = {moe.deepep_num_sms} and moe.hybridep_num_sms = {moe.hybridep_num_sms} set the same "
            "number of multiprocessors",
            "keep one of them",
        )


def narrow_formats_travel_by_ncclep(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """No other library carries tokens in another format; only the handbook's commit has the fields.

    Megatron, config: `require the 'ncclep' flex dispatcher backend` (handbook 3.7).
    """
    for name in ("dispatch_fwd_dtype", "combine_bwd_dtype"):
        asked = getattr(recipe.moe, name)
        if recipe.moe.num_experts and asked not in (None, "bf16") and _backend(recipe) != "ncclep":
            yield Violation(
                (f"moe.{name}", "moe.flex_dispatcher_backend", "moe.dispatcher"),
                f"`moe.{name}: {asked}` needs `moe.dispatcher: flex` with `moe.flex_dispatcher_backend: ncclep`",
            )


def narrow_formats_travel_between_blackwells(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """The format of tokens on their way is MXFP8, which Hopper cannot make.

    Megatron, first step: Transformer Engine's quantizer stops (handbook 3.7).
    """
    for name in ("dispatch_fwd_dtype", "combine_bwd_dtype"):
        asked = getattr(recipe.moe, name)
        if recipe.moe.num_experts and asked not in (None, "bf16") and not is_blackwell(target):
            yield Violation(
                (f"moe.{name}",), f"`moe.{name}: {asked}` needs Blackwell GPUs, and {target.name} has {target.gpu}"
            )


def padding_needs_a_capacity(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """It pads up to the capacity.

    Megatron, config: `moe_expert_capacity_factor must be set to use moe_pad_expert_input_to_capacity`
    (megatron/core/transformer/transformer_config.py:1688).
    """
    moe = recipe.moe
    if moe.num_experts and moe.pad_expert_input_to_capacity and moe.expert_capacity_factor is None:
        yield Violation(
            ("moe.pad_expert_input_to_capacity",),
            "`moe.pad_expert_input_to_capacity` needs `moe.expert_capacity_factor`",
        )


def deepep_takes_no_padding(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """DeepEP is the flex dispatcher's default library.

    Megatron, config: `Flex token dispatcher with deepep backend does not support moe_pad_expert_input_to_capacity`
    (megatron/core/transformer/transformer_config.py:1604).
    """
    moe = recipe.moe
    if moe.num_experts and moe.pad_expert_input_to_capacity and _backend(recipe) == "deepep":
        yield Violation(
            ("moe.pad_expert_input_to_capacity", "moe.flex_dispatcher_backend", "moe.dispatcher"),
            "`moe.pad_expert_input_to_capacity` does not go with `moe.dispatcher: flex` and DeepEP, its default",
            "use `flex_dispatcher_backend: hybridep`, or `dispatcher: alltoall`",
        )


def a_capacity_goes_with_losses(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Methods that choose experts themselves cannot have their choices dropped.

    Megatron, config: `moe_expert_capacity_factor only works with aux_loss, seq_aux_loss, global_aux_loss or none`
    (megatron/core/transformer/transformer_config.py:1671, 1681).
    """
    wrong = [method for method in recipe.balance.type or () if method not in _WITH_CAPACITY]
    if recipe.moe.num_experts and recipe.moe.expert_capacity_factor is not None and wrong:
        yield Violation(
            ("moe.expert_capacity_factor", "balance.type"),
            f"`moe.expert_capacity_factor` does not go with `balance.type: {wrong[0]}`",
            "unset it with `null`, or balance by one of the losses",
        )


def a_capacity_leaves_some_tokens(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A capacity of 0 drops every token, and no expert is ever trained.

    Megatron, never: it trains attention alone (megatron/core/transformer/moe/moe_utils.py:256).
    """
    if recipe.moe.num_experts and recipe.moe.expert_capacity_factor == 0:
        yield Violation(
            ("moe.expert_capacity_factor",),
            "`moe.expert_capacity_factor: 0` drops every token before it reaches an expert",
            "`null` drops none; 1 is an even share",
        )


def finetuning_drops_no_tokens(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Dropped tokens punch holes in pairs of question and answer.

    A warning, since pretraining can go on with `finetune` as well.

    Megatron, never: it drops them (handbook 3.7).
    """
    if recipe.moe.num_experts and recipe.moe.expert_capacity_factor and recipe.checkpoint.finetune:
        yield Violation(
            ("moe.expert_capacity_factor", "checkpoint.finetune"),
            f"moe.expert_capacity_factor = {recipe.moe.expert_capacity_factor:g} drops tokens out of the answers that "
            "fine-tuning teaches",
            "unset it with `null`: fine-tuning goes without a capacity (handbook 3.7)",
            "warning",
        )


def ncclep_has_a_rank_capacity(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """It is the size of the buffer that receives tokens.

    Megatron, build: `The 'ncclep' backend requires moe_expert_rank_capacity_factor to be set`
    (megatron/core/transformer/moe/token_dispatcher.py:1564).
    """
    moe = recipe.moe
    if moe.num_experts and _backend(recipe) == "ncclep" and moe.expert_rank_capacity_factor is None:
        yield Violation(
            ("moe.flex_dispatcher_backend", "moe.expert_rank_capacity_factor"),
            "`moe.flex_dispatcher_backend: ncclep` needs `moe.expert_rank_capacity_factor`, the size of its buffer",
            "set it generously: a rank that gets more tokens ends the run",
        )


def a_rank_capacity_needs_its_library(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Only HybridEP and NCCL EP have a buffer of a size that is said; DeepEP is the default.

    Megatron, config: `moe_expert_rank_capacity_factor requires moe_flex_dispatcher_backend to be ...`
    (megatron/core/transformer/transformer_config.py:1694).
    """
    moe = recipe.moe
    if moe.num_experts and moe.expert_rank_capacity_factor is not None and flex_library(recipe) == "deepep":
        yield Violation(
            ("moe.expert_rank_capacity_factor", "moe.flex_dispatcher_backend"),
            "`moe.expert_rank_capacity_factor` needs `moe.flex_dispatcher_backend` hybridep or ncclep, and not deepep, "
            "the default",
        )


def a_rank_capacity_of_hybridep_needs_fused_experts(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Only fused experts stop at the tokens that came.

    Megatron, config: `requires use_transformer_engine_op_fuser to be enabled`
    (megatron/core/transformer/transformer_config.py:1702).
    """
    moe = recipe.moe
    capacity = moe.expert_rank_capacity_factor is not None and moe.flex_dispatcher_backend == "hybridep"
    if moe.num_experts and capacity and not (moe.enable_deepep or recipe.memory.use_transformer_engine_op_fuser):
        yield Violation(
            ("moe.expert_rank_capacity_factor", "memory.use_transformer_engine_op_fuser"),
            "`moe.expert_rank_capacity_factor` with hybridep needs `memory.use_transformer_engine_op_fuser`",
        )


RULES: tuple[Rule, ...] = (
    deepep_rides_on_the_flex_dispatcher,
    deepep_shares_with_no_other_library,
    deepep_displaces_no_other_library,
    ncclep_rides_on_the_flex_dispatcher,
    a_library_rides_on_the_flex_dispatcher,
    libraries_have_ranks_to_reach,
    one_number_of_sms_is_given,
    narrow_formats_travel_by_ncclep,
    narrow_formats_travel_between_blackwells,
    padding_needs_a_capacity,
    deepep_takes_no_padding,
    a_capacity_goes_with_losses,
    a_capacity_leaves_some_tokens,
    finetuning_drops_no_tokens,
    ncclep_has_a_rank_capacity,
    a_rank_capacity_needs_its_library,
    a_rank_capacity_of_hybridep_needs_fused_experts,
)
