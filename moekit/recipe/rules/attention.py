"""Rules on attention: heads, query groups, latent attention, windows, sinks."""

from __future__ import annotations

from collections.abc import Iterator

from moekit.recipe.rules.violation import Rule, Target, Violation, divisors, listed
from moekit.recipe.schema import Recipe


def heads_divide_the_width(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A head's width is the model's divided by the heads, where it is not given.

    Megatron, validate: a bare assert (megatron/training/arguments.py:1293).
    """
    width, heads = recipe.model.hidden_size, recipe.model.num_attention_heads
    if width and heads and recipe.model.kv_channels is None and width % heads:
        yield Violation(
            ("model.num_attention_heads", "model.hidden_size"),
            f"{heads} attention heads do not divide model.hidden_size = {width}",
            "change one of them, or give a head's width as `model.kv_channels`",
        )


def heads_divide_over_tensor_ranks(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Each tensor-parallel rank holds whole heads, equally many.

    Megatron, config: `num_attention_heads (4) must be a multiple of tensor_model_parallel_size (8)`
    (megatron/core/transformer/transformer_config.py:1324).
    """
    heads, ranks = recipe.model.num_attention_heads, recipe.parallel.tensor_model or 1
    if heads and heads % ranks:
        yield Violation(
            ("parallel.tensor_model", "model.num_attention_heads"),
            f"{heads} attention heads cannot be divided over parallel.tensor_model = {ranks} ranks",
            f"use one of {divisors(heads)}",
        )


def query_groups_divide_heads(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Each group of heads shares one key and value head.

    Megatron, first step: `shape '[32, 2, 3, 48]' is invalid for input of size 10240`
    (megatron/core/transformer/attention.py:1867).
    """
    heads, groups = recipe.model.num_attention_heads, _groups(recipe)
    if heads and groups and heads % groups and not _cut_groups(recipe):
        yield Violation(
            ("model.num_query_groups", "model.num_attention_heads"),
            f"{groups} query groups do not divide model.num_attention_heads = {heads}",
            f"use one of {divisors(heads)}",
        )


def query_groups_fit_tensor_ranks(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A rank holds whole groups, or a group lies on whole ranks.

    Megatron, config: `num_query_groups (3) must be a multiple or divisor of tensor_model_parallel_size (2)`
    (megatron/core/transformer/transformer_config.py:1342).
    """
    if _cut_groups(recipe):
        ranks = recipe.parallel.tensor_model
        yield Violation(
            ("model.num_query_groups", "parallel.tensor_model"),
            f"{_groups(recipe)} query groups are neither a multiple nor a divisor of parallel.tensor_model = {ranks}",
            "change one of them",
        )


def _groups(recipe: Recipe) -> int | None:
    """Query groups where they are switched on; 1 is Megatron's default."""
    return (recipe.model.num_query_groups or 1) if recipe.model.group_query_attention else None


def _cut_groups(recipe: Recipe) -> bool:
    """Whether tensor-parallel ranks would cut groups."""
    groups, ranks = _groups(recipe), recipe.parallel.tensor_model or 1
    return groups is not None and bool(groups % ranks and ranks % groups)


def query_groups_are_switched_on(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Without the switch every head keeps its own keys and values: a wider model is trained.

    Megatron, never: the groups are then dropped (megatron/training/argument_utils.py:332).
    """
    if recipe.model.num_query_groups and not recipe.model.group_query_attention:
        yield Violation(
            ("model.num_query_groups", "model.group_query_attention"),
            "`model.num_query_groups` does nothing without `model.group_query_attention`",
            "add `group_query_attention: true`",
        )


def query_groups_are_counted(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Without a number there is one group: all heads share one key and value. A warning, as some models are so.

    Megatron, never: 1 is its default (megatron/training/arguments.py, `--num-query-groups`).
    """
    if recipe.model.group_query_attention and not recipe.model.num_query_groups:
        yield Violation(
            ("model.group_query_attention", "model.num_query_groups"),
            "`model.group_query_attention` without `model.num_query_groups` gives all heads one key and value",
            "say `num_query_groups: 1` where that is meant",
            "warning",
        )


def one_kind_of_attention(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Latent attention compresses keys and values its own way.

    Megatron, validate: `Group query attention is mutually exclusive with multi latent attention`
    (megatron/training/arguments.py:1893).
    """
    if recipe.model.multi_latent_attention and recipe.model.group_query_attention:
        yield Violation(
            ("model.group_query_attention", "model.multi_latent_attention"),
            "`model.multi_latent_attention` excludes `model.group_query_attention`",
            "unset that with `null`",
        )


def local_attention_is_plain(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """The local attention holds a whole sequence, and keys as wide as values.

    Megatron, build: `Context parallelism is only supported by TEDotProductAttention`
    (megatron/core/transformer/dot_product_attention.py:57), or an unexpected argument `k_channels`.
    """
    if recipe.model.transformer_impl != "local" or recipe.runtime.device == "cpu":
        return
    for name, asked in (
        ("parallel.context", (recipe.parallel.context or 1) > 1),
        ("model.multi_latent_attention", recipe.model.multi_latent_attention),
    ):
        if asked:
            yield Violation(
                (name, "model.transformer_impl"),
                f"`{name}` needs Transformer Engine's attention, which `transformer_impl: local` has not",
                "unset `transformer_impl` with `null`",
            )


def windows_are_numbers(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A window is `left,right`; -1 is without end, and then brackets keep the text from being read as an option.

    Megatron, parse: `invalid tuple_type value`, or `expected one argument` (megatron/training/arguments.py:373).
    """
    if (text := recipe.model.window_size) is not None and (text.startswith("-") or _window(text) is None):
        yield Violation(
            ("model.window_size",),
            f"`window_size: {text}` is no window",
            "`'128,0'` tokens left and right, or `'(-1,0)'`",
        )


def windows_have_two_sides(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """One number is no pair.

    Megatron, first step: `tuple index out of range` (megatron/core/transformer/utils.py:46).
    """
    text = recipe.model.window_size
    if text and not text.startswith("-") and len(_window(text) or (0, 0)) == 1:
        yield Violation(("model.window_size",), f"`window_size: {text}` has one side", f"`'{text},0'` looks back alone")


def windows_are_said_for_every_layer(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A pattern says of each layer whether it has the window.

    Megatron, first step: `list index out of range`, when the model is built (megatron/core/transformer/utils.py:506).
    """
    pattern, layers = recipe.model.window_attn_skip_freq, recipe.model.num_layers
    if recipe.model.window_size and pattern and layers and 0 < len(pattern.layers) < layers:
        yield Violation(
            ("model.window_attn_skip_freq", "model.num_layers"),
            f"`model.window_attn_skip_freq` has {len(pattern.layers)} layers, but model.num_layers = {layers}",
            "it has one 1 (window) or 0 for each layer",
        )


def layers_skip_a_window(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Without a window every layer attends to all.

    Megatron, never: it then does not look at the pattern (megatron/core/transformer/utils.py:499).
    """
    if recipe.model.window_attn_skip_freq and not recipe.model.window_size:
        yield Violation(
            ("model.window_attn_skip_freq", "model.window_size"),
            "`model.window_attn_skip_freq` does nothing without `model.window_size`",
            "add that, or unset this with `null`",
        )


def _window(text: str) -> tuple[int, ...] | None:
    """The numbers of a window, as `tuple_type` of arguments.py:373 reads them."""
    try:
        return tuple(int(part) for part in text.strip("()").split(","))
    except ValueError:
        return None


def windows_see_whole_sequences(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Keys and values that go round in a ring pass a window by.

    Megatron, first step: Transformer Engine's context parallelism refuses the window
    (Transformer Engine 2.14, context_parallel.py).
    """
    window = _window(recipe.model.window_size or "-1,-1")
    ring = {"p2p", "a2a+p2p"} & {*(recipe.parallel.cp_comm_type or ("p2p",))}
    if (recipe.parallel.context or 1) > 1 and ring and window not in (None, (-1, 0), (-1, -1)):
        yield Violation(
            ("parallel.cp_comm_type", "model.window_size", "parallel.context"),
            f"`window_size: {recipe.model.window_size}` with parallel.context = {recipe.parallel.context} does not go "
            f"with the exchange {listed(sorted(ring))}",
            "`parallel: {cp_comm_type: [a2a]}` or `[all_gather]`",
        )


def sinks_see_whole_sequences(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A softmax with a sink is one over all keys: each rank needs a head's whole sequence.

    Megatron, first step: no attention backend is available (Transformer Engine 2.14, dot_product_attention/utils.py).
    """
    kind, ways = recipe.model.softmax_type or "vanilla", recipe.parallel.cp_comm_type or ("p2p",)
    if kind != "vanilla" and (recipe.parallel.context or 1) > 1 and {*ways} != {"a2a"}:
        yield Violation(
            ("parallel.cp_comm_type", "model.softmax_type", "parallel.context"),
            f"`softmax_type: {kind}` with parallel.context = {recipe.parallel.context} does not go with the exchange "
            f"{listed(ways)}",
            "`parallel: {cp_comm_type: [a2a]}`",
        )


def context_needs_a_fast_kernel(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Transformer Engine's plain attention holds a whole sequence; the fast ones take heads in eights, up to 256 wide.

    Megatron, first step: no attention backend is available (Transformer Engine 2.14, dot_product_attention/utils.py).
    """
    model, ranks = recipe.model, recipe.parallel.context or 1
    if model.attention_backend == "unfused" and ranks > 1:
        yield Violation(
            ("model.attention_backend", "parallel.context"),
            f"`attention_backend: unfused` goes with no parallel.context = {ranks}",
            "use `fused` or `flash`, or leave it to Transformer Engine: `auto`",
        )
    width = model.kv_channels or (model.hidden_size or 0) // (model.num_attention_heads or 1)
    plain = model.multi_latent_attention or model.transformer_impl == "local"
    if ranks > 1 and not plain and (width % 8 or width > 256):
        yield Violation(
            ("model.kv_channels", "model.num_attention_heads", "model.hidden_size", "parallel.context"),
            f"heads {width} wide go with no parallel.context = {ranks}: fast attention takes multiples of 8 up to 256",
        )


def long_sequences_have_no_mask(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A mask says of each pair of tokens who sees whom, and Transformer Engine's causal attention looks at none.

    Megatron, never: its loader makes it unless told not to, in fp32 first, and takes it to the GPU; the host or the
    GPU may have no room (megatron/core/datasets/gpt_dataset.py:799; Megatron-LM issue 1025).
    A warning: where there is room it trains.
    """
    data, length = recipe.data, recipe.model.seq_length or 0
    told = data.no_create_attention_mask_in_dataloader or data.reset_attention_mask
    if length < 32768 or told or recipe.model.transformer_impl == "local":
        return
    if "--dataloader-inter-document-masking" not in (recipe.megatron.extra or ()):
        yield Violation(
            ("model.seq_length", "data.no_create_attention_mask_in_dataloader"),
            f"each sequence comes with a mask of {length:,} x {length:,}, {length**2 / 2**30:,.0f} GiB, at which "
            "attention does not look",
            "`data: {no_create_attention_mask_in_dataloader: true}`",
            "warning",
        )


RULES: tuple[Rule, ...] = (
    heads_divide_the_width,
    heads_divide_over_tensor_ranks,
    query_groups_divide_heads,
    query_groups_fit_tensor_ranks,
    query_groups_are_switched_on,
    query_groups_are_counted,
    one_kind_of_attention,
    local_attention_is_plain,
    windows_are_numbers,
    windows_have_two_sides,
    windows_are_said_for_every_layer,
    layers_skip_a_window,
    windows_see_whole_sequences,
    sinks_see_whole_sequences,
    context_needs_a_fast_kernel,
    long_sequences_have_no_mask,
)
