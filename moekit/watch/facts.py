"""What of Megatron's arguments decides how a run's numbers are to be read: the balancer's scope, the losses' floors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Scope = Literal["micro batch", "global batch", "sequence"]

AUX_LOSSES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
"""By `--moe-router-load-balancing-type`, the name that Megatron logs it under."""


@dataclass(frozen=True)
class Facts:
    """Of one run, from its configuration."""

    scopes: tuple[Scope, ...] = ()
    """In which the load is balanced, or has to be read; empty of a dense run. Balanced over the global batch, an expert
    may be uneven in every micro batch: quantile and global balancing are read in both (HB 1179). Per sequence nothing
    can be said from counts of micro batches."""
    balancing: str = ""
    """In words, empty of a dense run."""
    aux_losses: tuple[str, ...] = ()
    """The balancing losses that act, by the names that Megatron logs. It logs `load_balancing_loss` for `seq_aux_loss`
    too, as a constant 0, and those whose coefficient is 0."""
    aux_floor: float = 1.0
    """What they are where either the router's probabilities or its choices are even (HB 932), as Megatron logs it."""
    train_iters: int | None = None
    tokens_a_step: int | None = None
    forced: bool = False
    """Whether routing is forced and not learnt: a control."""
    multi_node: bool = False
    control_tflops: float | None = None
    """TFLOP/s of each GPU in the control with forced even routing, None where none is named."""


def facts_of(config: Mapping[str, Any], *, multi_node: bool = False, control_tflops: float | None = None) -> Facts:
    """Read them from Megatron's arguments, the `config` lines of `metrics.jsonl`."""
    batch, length = config.get("global_batch_size"), config.get("seq_length")
    common: dict[str, Any] = {
        "train_iters": config.get("train_iters") or None,
        "tokens_a_step": int(batch) * int(length) if batch and length else None,
        "multi_node": multi_node,
    }
    if not config.get("num_experts"):
        return Facts(**common)
    kinds = _acting(config)
    bias = bool(config.get("moe_router_enable_expert_bias"))
    return Facts(
        scopes=_scopes(kinds, bias),
        balancing=" and ".join([*(["expert bias"] if bias else []), *kinds]) or "nothing",
        aux_losses=tuple(AUX_LOSSES[kind] for kind in kinds if kind in AUX_LOSSES),
        aux_floor=_aux_floor(config),
        forced=bool(config.get("moe_router_force_load_balancing"))
        or config.get("moe_router_force_biased") not in (None, False),
        control_tflops=control_tflops,
        **common,
    )


def _acting(config: Mapping[str, Any]) -> list[str]:
    """The methods that do something: a loss needs a coefficient (router.py, `get_aux_loss_coeff`)."""
    said, coefficients = config.get("moe_router_load_balancing_type") or [], config.get("moe_aux_loss_coeff") or 0
    kinds = [said] if isinstance(said, str) else list(said)
    if not isinstance(coefficients, list):
        coefficients = [coefficients] * len(kinds)
    pairs = zip(kinds, coefficients, strict=False)
    return [kind for kind, factor in pairs if kind != "none" and (kind not in AUX_LOSSES or factor)]


def _scopes(kinds: list[str], bias: bool) -> tuple[Scope, ...]:
    """By what each method's counts are summed over before it acts.

    `aux_loss` and sinkhorn see one micro batch, `global_aux_loss` adds up counts over data parallel ranks and micro
    batches, quantile balancing and the expert bias move once a global batch (megatron/core/transformer/moe/router.py:
    `_apply_aux_loss`, `sinkhorn_load_balancing`, `_apply_global_aux_loss`, `quantile_balancing`; finalize_model_grads).
    """
    both = {"global_aux_loss", "quantile_balancing"} & set(kinds)
    scopes: list[Scope] = []
    if both or {"aux_loss", "sinkhorn"} & set(kinds):
        scopes.append("micro batch")
    if both or bias or not kinds:
        scopes.append("global batch")
    return (*scopes, "sequence") if "seq_aux_loss" in kinds else tuple(scopes)


def _aux_floor(config: Mapping[str, Any]) -> float:
    """1, or less where Megatron divides by more layers than it adds up.

    megatron-core 0.19.2 adds `--mtp-num-layers` to the layers that have experts, whether or not they have any
    (moe_logging.py, `_count_moe_layers`), and a repeated one adds 1 over all its depths.
    """
    depths = int(config.get("mtp_num_layers") or 0)
    if not depths:
        return 1.0
    layers, pattern = int(config.get("num_layers") or 0), config.get("moe_layer_freq") or 1
    if isinstance(pattern, int):
        pattern = [int(layer % pattern == 0) for layer in range(layers)]
    own = sum(map(int, pattern))
    added = (1 if config.get("mtp_use_repeated_layer") else depths) if pattern and pattern[-1] else 0
    return float((own + added) / (own + depths))
