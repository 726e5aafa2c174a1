"""Rules on number formats."""

from __future__ import annotations

from collections.abc import Iterator

from moekit.recipe.rules.violation import Rule, Target, Violation, below, is_blackwell
from moekit.recipe.schema import Recipe


def one_16_bit_format(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Weights and activations have one 16-bit format.

    Megatron, validate: a bare assert (megatron/training/arguments.py:1173).
    """
    if recipe.precision.bf16 and recipe.precision.fp16:
        yield Violation(
            ("precision.fp16", "precision.bf16"),
            "`precision.bf16` and `precision.fp16` exclude each other",
            "unset one of them with `null`",
        )


def one_quantized_format(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Matrix multiplications have one quantized format.

    Megatron, validate: `--fp4-format and --fp8-format cannot be used simultaneously`
    (megatron/training/arguments.py:1066); handbook 4.
    """
    if recipe.precision.fp8_format and recipe.precision.fp4_format:
        yield Violation(
            ("precision.fp4_format", "precision.fp8_format"),
            "`precision.fp8_format` and `precision.fp4_format` exclude each other",
            "unset one of them with `null`",
        )


def fp8_fits_the_gpu(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """FP8's kernels need a GPU that multiplies in it: Hopper for most recipes, Blackwell for MXFP8.

    Megatron, first step: Transformer Engine's `Device compute capability 8.9 or higher required for FP8 execution`,
    `Device compute capability 10.0 or higher required for MXFP8 execution` (Transformer Engine 2.16, quantization.py,
    `check_recipe_support`; handbook 3.7).
    """
    recipe_name = recipe.precision.fp8_recipe or "delayed"
    if not recipe.precision.fp8_format or recipe_name == "custom":
        return
    if target.gpu == "a100":
        yield Violation(
            ("precision.fp8_format",), f"FP8 needs Hopper or later; {target.name} has {target.gpu}", "`bf16` alone"
        )
    elif recipe_name == "mxfp8" and not is_blackwell(target):
        yield Violation(
            ("precision.fp8_recipe",),
            f"`mxfp8` needs Blackwell; {target.name} has {target.gpu}",
            "Hopper's is `blockwise`",
        )


def fp4_fits_the_gpu(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """NVFP4's kernels are Blackwell's.

    Megatron, first step: Transformer Engine's `Device compute capability 10.0 or higher required for NVFP4 execution`
    (Transformer Engine 2.16, quantization.py, `check_nvfp4_support`; handbook 4).
    """
    if recipe.precision.fp4_format and not is_blackwell(target):
        yield Violation(
            ("precision.fp4_format",),
            f"FP4 needs Blackwell; {target.name} has {target.gpu}",
            "Hopper has FP8: `precision: {fp4_format: null, fp8_format: e4m3, fp8_recipe: blockwise}`",
        )


def blockwise_fp8_fits_the_software(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """The kernels of blockwise FP8 come with CUDA 12.9, and for Blackwell with Transformer Engine 2.9.

    Megatron, first step: Transformer Engine's `FP8 block scaled GEMM requires Hopper and CUDA >= 12.9`
    (Transformer Engine 2.5, fp8.py, and 2.9, quantization.py, `check_fp8_block_scaling_support`).
    """
    if not recipe.precision.fp8_format or recipe.precision.fp8_recipe != "blockwise" or target.gpu == "a100":
        return
    if below(target.cuda, "12.9"):
        yield Violation(
            ("precision.fp8_recipe",),
            f"`blockwise` needs CUDA 12.9; {target.name} has {target.cuda}",
            "use a newer image, or `precision: {fp8_recipe: tensorwise}`",
        )
    elif is_blackwell(target) and below(target.transformer_engine, "2.9"):
        yield Violation(
            ("precision.fp8_recipe",),
            f"`blockwise` on Blackwell needs Transformer Engine 2.9; {target.name} has {target.transformer_engine}",
            "Blackwell's is `mxfp8`",
        )


def fp8_recipes_find_their_version(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Each recipe came with a version of Transformer Engine.

    Megatron, first step: `Please make sure to use TransformerEngine version >= 2.2.0.dev0 for Float8CurrentScaling, >=
    2.1.0 for MXFP8BlockScaling, and >= 2.3.0.dev0 for Float8BlockScaling` (megatron/core/fp8_utils.py:762).
    """
    name, version = recipe.precision.fp8_recipe or "delayed", target.transformer_engine
    needed = {"tensorwise": "2.2", "mxfp8": "2.1", "blockwise": "2.3"}.get(name)
    if recipe.precision.fp8_format and needed and below(version, needed):
        yield Violation(
            ("precision.fp8_recipe",),
            f"`{name}` needs Transformer Engine {needed}; {target.name} has {version}",
            "use a newer image",
        )


def experts_in_fp8_find_their_version(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Older kernels stop at an expert without tokens, or have no grouped multiplication in FP8.

    Megatron, config: `Only transformer-engine>=1.7.0 supports MoE FP8 training`, `Only transformer-engine>=1.11.0
    supports FP8 grouped gemm` (megatron/core/transformer/transformer_config.py:2298, 2304).
    """
    version, needed = target.transformer_engine, "1.11" if recipe.moe.grouped_gemm else "1.7"
    if recipe.precision.fp8_format and recipe.moe.num_experts and below(version, needed):
        yield Violation(
            ("precision.fp8_format", "moe.num_experts"),
            f"experts in FP8 need Transformer Engine {needed}; {target.name} has {version}",
            "use a newer image",
        )


def fp4_finds_its_version(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """NVFP4 came with a version of Transformer Engine.

    Megatron, validate: `--fp4-format requires Transformer Engine >= 2.7.0.dev0 for NVFP4BlockScaling support`
    (megatron/training/arguments.py:1074); handbook 4.
    """
    if recipe.precision.fp4_format and below(target.transformer_engine, "2.7"):
        yield Violation(
            ("precision.fp4_format",),
            f"FP4 needs Transformer Engine 2.7; {target.name} has {target.transformer_engine}",
            "use a newer image",
        )


def fp8_matrices_come_in_sixteens(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Transformer Engine's FP8 kernels take matrices whose rows come in eights and whose columns come in sixteens.

    Megatron, first step: `FP8 execution requires the product of all dimensions except the last to be divisible by 8 and
    the last dimension to be divisible by 16` (Transformer Engine 2.14, utils.py).
    """
    model, parallel, ranks = recipe.model, recipe.parallel, recipe.parallel.tensor_model or 1
    if not recipe.precision.fp8_format:
        return
    tokens = (recipe.train.micro_batch_size or 0) * (model.seq_length or 0) // (parallel.context or 1)
    if parallel.sequence:
        tokens //= ranks
    for field, number, divisor, what in (
        ("model.hidden_size", model.hidden_size or 0, 16, "the hidden size"),
        ("moe.ffn_hidden_size", recipe.moe.ffn_hidden_size or 0, 16, "an expert's width"),
        ("model.seq_length", tokens, 8, "a rank's part of a micro batch"),
    ):
        if number % divisor:
            what = f"{what}, {number}, is no multiple of {divisor}, as FP8 needs"
            yield Violation((field, "precision.fp8_format"), what, f"use a multiple of {divisor}")


def custom_formats_have_a_quantizer(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A recipe of one's own is a Python function that is named.

    Megatron, config: `fp8_quantizer_factory must be provided when fp8_recipe is 'custom'`, the same of fp4
    (megatron/core/transformer/transformer_config.py:1433, 1459).
    """
    precision, extra = recipe.precision, recipe.megatron.extra or ()
    for name, on, chosen in (
        ("fp8", precision.fp8_format, precision.fp8_recipe),
        ("fp4", precision.fp4_format, precision.fp4_recipe),
    ):
        if on and chosen == "custom" and f"--{name}-quantizer-factory" not in extra:
            yield Violation(
                (f"precision.{name}_recipe",),
                f"`{name}_recipe: custom` needs `--{name}-quantizer-factory`",
                f"`megatron: {{extra: [--{name}-quantizer-factory, package.module.function]}}`",
            )


def quantized_layers_are_transformer_engines(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Megatron's own layers have no quantized multiplication.

    Megatron, never: it trains in the higher format under the name of the lower (megatron/core/transformer/mlp.py and
    megatron/core/tensor_parallel/layers.py, which ask for neither).
    """
    precision = recipe.precision
    for name in ("fp8_format", "fp4_format"):
        if getattr(precision, name) and recipe.model.transformer_impl == "local":
            yield Violation(
                (f"precision.{name}", "model.transformer_impl"),
                f"`precision.{name}` does nothing with `transformer_impl: local`",
                "`model: {transformer_impl: transformer_engine}`, or unset the format with `null`",
            )


def delayed_scalings_settings_have_it(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Margin, history and gradients' format are delayed scaling's; other recipes scale by what they see.

    Megatron, never: it hands them to `TEDelayedScaling` alone (megatron/core/fp8_utils.py:733-770).
    """
    precision = recipe.precision
    delayed = precision.fp8_format and precision.fp8_recipe in (None, "delayed")
    for name in ("fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo", "no_fp8_wgrad"):
        if getattr(precision, name) not in (None, False) and not delayed:
            yield Violation(
                (f"precision.{name}", "precision.fp8_recipe"),
                f"`precision.{name}` does nothing without `precision.fp8_format` and `fp8_recipe: delayed`",
                "unset it with `null`",
            )


def outer_layers_stay_out_of_delayed_scaling(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Delayed scaling keeps one history over all layers. It is Megatron's recipe where none is said.

    Megatron, config: `Delayed scaling does not support first / last layer in BF16`
    (megatron/core/transformer/transformer_config.py:1403).
    """
    precision = recipe.precision
    if precision.fp8_format and precision.first_last_layers_bf16 and precision.fp8_recipe in (None, "delayed"):
        yield Violation(
            ("precision.first_last_layers_bf16", "precision.fp8_recipe"),
            "`precision.first_last_layers_bf16` excludes `fp8_recipe: delayed`",
            "`precision: {fp8_recipe: blockwise}`, on Blackwell `mxfp8`",
        )


def outer_layers_are_on_one_stage(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """The layers that stay in bfloat16 are at most those of a pipeline stage. Where no number is said there is 1.

    Megatron, config: `num_layers_at_start_in_bf16 must be between 0 and number of layers per pipeline stage`
    (megatron/core/transformer/transformer_config.py:1416, 1425).
    """
    precision, layers, stages = recipe.precision, recipe.model.num_layers, recipe.parallel.pipeline_model or 1
    if not (precision.fp8_format and precision.first_last_layers_bf16 and layers):
        return
    for name in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"):
        given = getattr(precision, name)
        count = 1 if given is None else given
        if count > layers // stages:
            yield Violation(
                (f"precision.{name}", "model.num_layers", "parallel.pipeline_model"),
                f"`precision.{name}` is {count}, more than the {layers // stages} layers of a pipeline stage",
                f"at most {layers // stages}",
            )


def outer_layers_stay_out_of_something(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Where nothing is quantized, all layers are in bfloat16 anyway.

    Megatron, never: it looks at the outer layers where it quantizes (megatron/core/fp8_utils.py:792).
    """
    precision = recipe.precision
    if precision.first_last_layers_bf16 and not (precision.fp8_format or precision.fp4_format):
        yield Violation(
            ("precision.first_last_layers_bf16", "precision.fp8_format"),
            "`precision.first_last_layers_bf16` does nothing without `precision.fp8_format` or `precision.fp4_format`",
            "add one, or unset this with `null`",
        )


def padding_is_for_quantization(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Tokens are padded for kernels in FP8 or FP4, where the dispatcher can. It is allgather where nothing is said.

    Megatron, config: `fp8/fp4 must be specified when moe_router_padding_for_quantization is True`, `allgather and
    alltoall_seq dispatcher does not support moe_router_padding_for_quantization`
    (megatron/core/transformer/transformer_config.py:2319, 2324).
    """
    older = "--moe-router-padding-for-fp8" in (recipe.megatron.extra or ())
    if not recipe.router.padding_for_quantization and not older:
        return
    if not (recipe.precision.fp8_format or recipe.precision.fp4_format):
        yield Violation(
            ("router.padding_for_quantization", "precision.fp8_format"),
            "`router.padding_for_quantization` needs `precision.fp8_format` or `precision.fp4_format`",
            "unset it with `null` where nothing is quantized",
        )
    elif recipe.moe.dispatcher in (None, "allgather"):
        yield Violation(
            ("router.padding_for_quantization", "moe.dispatcher"),
            "`router.padding_for_quantization` needs `moe.dispatcher` alltoall or flex",
            "`moe: {dispatcher: alltoall}`",
        )


RULES: tuple[Rule, ...] = (
    one_16_bit_format,
    one_quantized_format,
    fp8_fits_the_gpu,
    fp4_fits_the_gpu,
    blockwise_fp8_fits_the_software,
    fp8_recipes_find_their_version,
    experts_in_fp8_find_their_version,
    fp4_finds_its_version,
    fp8_matrices_come_in_sixteens,
    custom_formats_have_a_quantizer,
    quantized_layers_are_transformer_engines,
    delayed_scalings_settings_have_it,
    outer_layers_stay_out_of_delayed_scaling,
    outer_layers_are_on_one_stage,
    outer_layers_stay_out_of_something,
    padding_is_for_quantization,
)
