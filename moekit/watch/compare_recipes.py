"""What two recipes differ in: the question that a comparison answers, and what else stands between them. No effects.

Some differences belong together: an MoE and its dense twin differ in every field that only experts have, and FP8 comes
with padding in the router. Such a theme is one group; every other field is in the group of its section.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from moekit.recipe.schema import Recipe

Theme = Literal["fp8", "nvfp4", "forced balance", "one expert", "upcycling", "experts"]
Change = tuple[str, Any, Any]
"""(dotted field, value in A, value in B), None where it is unset: what `moekit diff` prints."""

_SILENT = ("log", "monitor", "resilience", "profile")
"""Sections that decide what is seen of a training and how it ends, not what it computes; nor do these fields."""
_SILENT_FIELDS = {
    "summary",
    *(f"train.{name}" for name in ("exit_interval", "eval_interval", "eval_iters")),
    "data.num_workers",
    *(f"checkpoint.{name}" for name in ("save", "save_interval", "save_retain_interval", "keep_last", "keep_every")),
    *(f"checkpoint.{name}" for name in ("async_save", "no_save_optim", "no_save_rng")),
    *(f"runtime.{name}" for name in ("time_limit_min", "secrets")),
}
_LOW_PRECISION = (
    *("precision.fp8_", "precision.fp4_", "precision.no_fp8_wgrad", "precision.reuse_grad_buf_for_mxfp8_param_ag"),
    *("precision.first_last_layers_bf16", "precision.num_layers_at_", "router.padding_for_quantization"),
    *("moe.dispatch_fwd_dtype", "moe.combine_bwd_dtype"),
)
_EXPERTS = ("moe.", "router.", "balance.", "parallel.expert_", "overlap.moe_", "overlap.delay_wgrad_compute")
_FIELDS: dict[Theme, tuple[str, ...]] = {
    "fp8": _LOW_PRECISION,
    "nvfp4": _LOW_PRECISION,
    "forced balance": ("benchmark", "balance."),
    "one expert": (*_EXPERTS, "model.ffn_hidden_size", "checkpoint."),
    "upcycling": (*_EXPERTS, "model.ffn_hidden_size", "checkpoint."),
    "experts": _EXPERTS,
}
"""How the fields of each begin."""


@dataclass(frozen=True)
class Difference:
    """What two recipes differ in."""

    theme: Theme | None
    asked: int
    """Which run has what the theme is named after: 0 the first, 1 the second."""
    groups: dict[str, list[Change]] = field(default_factory=dict)
    """By the theme's name or the section; the theme first."""

    @property
    def others(self) -> list[str]:
        """Fields that do not belong to the theme."""
        return [name for group, changes in self.groups.items() if group != self.theme for name, _, _ in changes]


def difference(one: Recipe, other: Recipe, changes: list[Change]) -> Difference:
    """Sort the changes into groups; `changes` are those between the two."""
    theme, asked = _theme(one, other)
    begins = _FIELDS[theme] if theme else ()
    groups: dict[str, list[Change]] = {theme: []} if theme else {}
    for change in changes:
        name = change[0]
        if is_silent(name):
            continue
        group = theme if theme and name.startswith(begins) else name.partition(".")[0]
        groups.setdefault(group, []).append(change)
    return Difference(theme, asked, groups)


def is_silent(name: str) -> bool:
    """Whether a field changes nothing in what is computed."""
    return name in _SILENT_FIELDS or name.partition(".")[0] in _SILENT


def _theme(one: Recipe, other: Recipe) -> tuple[Theme | None, int]:
    experts = [recipe.moe.num_experts or 0 for recipe in (one, other)]
    if 0 in experts and any(experts):
        asked = int(bool(experts[1]))
        moe = (one, other)[asked]
        if experts[asked] == 1:
            return "one expert", asked
        return "upcycling" if moe.moe.use_upcycling else "experts", asked
    asks: tuple[tuple[Theme, Callable[[Recipe], bool]], ...] = (
        ("forced balance", _is_forced),
        ("nvfp4", lambda recipe: bool(recipe.precision.fp4_format)),
        ("fp8", lambda recipe: bool(recipe.precision.fp8_format)),
    )
    for theme, has in asks:
        if has(one) != has(other):
            asked = int(has(other))
            base = (other, one)[asked]
            return (None, 0) if theme == "nvfp4" and base.precision.fp8_format else (theme, asked)
    return None, 0


def _is_forced(recipe: Recipe) -> bool:
    return bool(recipe.balance.force_load_balancing) or recipe.balance.force_biased is not None
