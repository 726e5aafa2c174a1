"""Rules on number formats and on the same bits twice."""

from __future__ import annotations

from collections.abc import Iterator

from moekit.problems import shortened
from moekit.recipe.rules.violation import Rule, Target, Violation
from moekit.recipe.schema import Recipe


def one_number_format(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Bare asserts at validate. Source: megatron/training/arguments.py:1066, 1173, 1182."""
    precision = recipe.precision
    if precision.bf16 and precision.fp16:
        yield Violation(
            ("precision.fp16", "precision.bf16"), "`precision.bf16` and `precision.fp16` exclude each other"
        )
    if precision.fp8_format and precision.fp4_format:
        yield Violation(
            ("precision.fp4_format", "precision.fp8_format"),
            "`precision.fp8_format` and `precision.fp4_format` exclude each other",
        )


def fp8_fits_the_gpu(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Transformer Engine refuses the first FP8 layer, with the GPUs held. Source: handbook 3.7; TE's `fp8.py`."""
    blackwell = target.gpu.startswith(("b", "gb"))
    if recipe.precision.fp8_format and recipe.precision.fp8_recipe == "mxfp8" and not blackwell:
        yield Violation(
            ("precision.fp8_recipe",),
            f"`mxfp8` needs Blackwell; {target.name} has {target.gpu}",
            "Hopper's is `blockwise`",
        )
    if recipe.precision.fp4_format and not blackwell:
        yield Violation(("precision.fp4_format",), f"FP4 needs Blackwell; {target.name} has {target.gpu}")


def padding_is_for_quantization(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Stops at config. Source: megatron/core/transformer/transformer_config.py:2318-2323."""
    if not recipe.router.padding_for_quantization:
        return
    if not (recipe.precision.fp8_format or recipe.precision.fp4_format):
        yield Violation(
            ("router.padding_for_quantization", "precision.fp8_format"),
            "`router.padding_for_quantization` needs `precision.fp8_format` or `precision.fp4_format`",
            "unset it with `null` where nothing is quantized",
        )
    if recipe.moe.dispatcher in (None, "allgather"):
        yield Violation(
            ("router.padding_for_quantization", "moe.dispatcher"),
            "`router.padding_for_quantization` needs `moe.dispatcher` alltoall or flex",
        )


def determinism_has_its_environment(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Stops at validate. Source: megatron/training/determinism.py:24, 40-50, 85-99; handbook 2.5."""
    if not recipe.precision.deterministic_mode:
        return
    for variable, accepted in DETERMINISTIC.items():
        value = (recipe.runtime.environment or {}).get(variable)
        words = value.split(",") if value and variable == "NCCL_ALGO" else [value]
        if value is not None and not {*words} <= {*accepted}:
            yield Violation(
                (f"runtime.environment.{variable}", "precision.deterministic_mode"),
                f"`precision.deterministic_mode` refuses {variable}={shortened(value)}",
                f"unset it with `null`: Megatron sets it to {accepted[0]} itself",
            )
    if recipe.overlap.tp_comm_overlap:
        yield Violation(
            ("overlap.tp_comm_overlap", "precision.deterministic_mode"),
            "`precision.deterministic_mode` excludes `overlap.tp_comm_overlap`",
        )


DETERMINISTIC = {
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0",),
    "NCCL_ALGO": ("Ring", "CollnetDirect", "CollnetChain", "^NVLS"),
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
}
"""What deterministic mode takes of a variable that is set, Megatron's own choice first."""


RULES: tuple[Rule, ...] = (
    one_number_format,
    fp8_fits_the_gpu,
    padding_is_for_quantization,
    determinism_has_its_environment,
)
