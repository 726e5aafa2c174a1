"""Rules on the world and how it is divided: tensor, context, data and optimizer ranks, sharded weights."""

from __future__ import annotations

from collections.abc import Iterator

from moekit.recipe.rules.violation import Rule, Target, Violation, listed
from moekit.recipe.schema import Recipe
from moekit.recipe.sizes import exchange_ranks


def the_world_is_given(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """The launch starts this many processes; a recipe has no default for it.

    Megatron, never: it takes what torchrun starts, and alone trains alone (megatron/training/arguments.py:144).
    """
    if recipe.parallel.gpus is None:
        yield Violation(("parallel.gpus",), "`parallel.gpus` is missing", "the run's world size, one process each")


def _layout(recipe: Recipe) -> tuple[int, int, int, int]:
    """Tensor, pipeline and context ranks, and copies of them (0 where the world is no multiple)."""
    parallel = recipe.parallel
    tensor, pipeline, context = parallel.tensor_model or 1, parallel.pipeline_model or 1, parallel.context or 1
    copies, rest = divmod(parallel.gpus or 0, tensor * pipeline * context)
    return tensor, pipeline, context, 0 if rest else copies


def _expert_copies(recipe: Recipe) -> int:
    """Copies of the experts in the world (0 where it is no multiple); of a dense model too (parallel_state.py:872)."""
    parallel = recipe.parallel
    copies, rest = divmod(parallel.gpus or 0, exchange_ranks(recipe) * (parallel.pipeline_model or 1))
    return 0 if rest else copies


def ranks_divide_the_world(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """The world holds whole copies of the model.

    Megatron, validate: `world size (8) is not divisible by total_model_size` (megatron/training/arguments.py:431).
    """
    tensor, pipeline, context, copies = _layout(recipe)
    ranks, gpus = tensor * pipeline * context, recipe.parallel.gpus
    if gpus and not copies:
        yield Violation(
            ("parallel.gpus", "parallel.tensor_model", "parallel.pipeline_model", "parallel.context"),
            f"parallel.gpus = {gpus} cannot be divided into copies of the model over {ranks} ranks "
            f"(tensor {tensor} x pipeline {pipeline} x context {context})",
            f"use a multiple of {ranks}",
        )


def nodes_are_whole(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A node's GPUs beyond the recipe's would idle, or torchrun would wait for ranks that never come.

    Megatron, never: the world is what torchrun starts, and no whole number of nodes is this one
    (torch/distributed/run.py, `--nproc-per-node`).
    """
    gpus = recipe.parallel.gpus
    if gpus and recipe.runtime.device != "cpu" and gpus > target.gpus_per_node and gpus % target.gpus_per_node:
        yield Violation(
            ("parallel.gpus",),
            f"parallel.gpus = {gpus} is no whole number of {target.name}'s nodes of {target.gpus_per_node}",
            f"use a multiple of {target.gpus_per_node}",
        )


def pipeline_comes_last_in_the_order(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """With pipeline neighbours before data neighbours, layers and experts must have equally many copies.

    Megatron, groups: `When not using pp-last rank ordering, the data parallel size of the attention and moe layers must
    be the same` (megatron/core/parallel_state.py:898).
    """
    _, pipeline, _, copies = _layout(recipe)
    experts = _expert_copies(recipe)
    if recipe.parallel.use_tp_pp_dp_mapping and pipeline > 1 and copies and experts and copies != experts:
        yield Violation(
            ("parallel.use_tp_pp_dp_mapping", "parallel.expert_model", "parallel.expert_tensor", "parallel.context"),
            f"`parallel.use_tp_pp_dp_mapping` needs as many copies of the experts as of the layers, not {experts} and "
            f"{copies}",
            "unset it with `null`, or make expert x expert-tensor ranks as many as tensor x context ranks",
        )


def context_ranks_cut_sequences(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Each context-parallel rank takes two equal parts of a sequence, one from either end.

    Megatron, validate: `seq-length should be a multiple of 2 * context-parallel-size`
    (megatron/training/arguments.py:1296).
    """
    length, ranks = recipe.model.seq_length, recipe.parallel.context or 1
    if length and ranks > 1 and length % (2 * ranks):
        yield Violation(
            ("parallel.context", "model.seq_length"),
            f"model.seq_length = {length} is no multiple of 2 x parallel.context = {2 * ranks}",
            f"use a multiple of {2 * ranks} tokens",
        )


def sequence_ranks_cut_sequences(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """With sequence parallelism each tensor-parallel rank takes an equal part of a sequence.

    Megatron, first step: `First dimension of the tensor should be divisible by tensor parallel size`
    (megatron/core/tensor_parallel/mappings.py).
    """
    length, (ranks, _, context, _) = recipe.model.seq_length, _layout(recipe)
    if recipe.parallel.sequence and length and not length % context and length // context % ranks:
        yield Violation(
            ("model.seq_length", "parallel.sequence", "parallel.tensor_model"),
            f"`parallel.sequence` cannot divide {length // context} tokens over parallel.tensor_model = {ranks} ranks",
            f"use a multiple of {ranks * context} tokens",
        )


def an_exchange_is_said_for_every_layer(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """One way to exchange keys and values for all layers, or one for each.

    Megatron, config: `Length of cp_comm_type (3) should equal to the total number of transformer layers (2)`
    (megatron/core/transformer/transformer_config.py:2780).
    """
    ways, layers = recipe.parallel.cp_comm_type or (), recipe.model.num_layers
    if (recipe.parallel.context or 1) > 1 and layers and len(ways) not in (0, 1, layers):
        yield Violation(
            ("parallel.cp_comm_type", "model.num_layers"),
            f"`parallel.cp_comm_type` has {len(ways)} entries, and model.num_layers = {layers}",
            "give one, or one for each layer",
        )


def an_exchange_is_known(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Transformer Engine exchanges keys and values in four ways.

    Megatron, first step: `Unsupported communication type` (Transformer Engine 2.14, context_parallel.py).
    """
    ways = ("p2p", "all_gather", "a2a", "a2a+p2p")
    unknown = [way for way in recipe.parallel.cp_comm_type or () if way not in ways]
    if (recipe.parallel.context or 1) > 1 and unknown:
        yield Violation(
            ("parallel.cp_comm_type",), f"`parallel.cp_comm_type` has `{unknown[0]}`", f"there are {listed(ways)}"
        )


def an_exchange_in_two_levels_has_their_sizes(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """`a2a+p2p` exchanges within groups of ranks and between them.

    Megatron, validate: `--hierarchical-context-parallel-sizes must be set when a2a+p2p is used`
    (megatron/training/arguments.py:566).
    """
    sized = "--hierarchical-context-parallel-sizes" in (recipe.megatron.extra or ())
    if "a2a+p2p" in (recipe.parallel.cp_comm_type or ()) and not sized:
        yield Violation(
            ("parallel.cp_comm_type", "megatron.extra"),
            "`parallel.cp_comm_type: a2a+p2p` needs `--hierarchical-context-parallel-sizes` in `megatron.extra`",
            "two sizes whose product is `parallel.context`",
        )


def exchanged_heads_are_whole(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """`a2a` trades a part of the sequence for whole heads, and for whole query groups.

    Megatron, first step: Transformer Engine asserts that a rank's heads divide by the context-parallel size
    (Transformer Engine 2.14, context_parallel.py).
    """
    model, (tensor, _, context, _) = recipe.model, _layout(recipe)
    heads = model.num_attention_heads
    if context == 1 or "a2a" not in (recipe.parallel.cp_comm_type or ()) or not heads or heads % tensor:
        return
    groups = (model.num_query_groups or 1) if model.group_query_attention else heads
    for name, number in (("num_attention_heads", heads), ("num_query_groups", groups)):
        held = max(number // tensor, 1)
        if held % context and (name != "num_query_groups" or groups != heads):
            yield Violation(
                (f"model.{name}", "parallel.context", "parallel.cp_comm_type"),
                f"{held} of model.{name} on a rank cannot be divided by `a2a` over parallel.context = {context} ranks",
                "`parallel: {cp_comm_type: [p2p]}`, or fewer context-parallel ranks",
            )


def optimizer_instances_divide_copies(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Each instance of the divided state lies over equally many copies of the layers, and of the experts.

    Megatron, groups: `Data parallel size should be divisible by partial DistOpt shard factor`
    (megatron/core/parallel_state.py:922, 1447).
    """
    instances = recipe.parallel.num_distributed_optimizer_instances or 1
    _, _, context, copies = _layout(recipe)
    for what, number in (("data and context", copies * context), ("expert-data", _expert_copies(recipe))):
        if number % instances:
            yield Violation(
                ("parallel.num_distributed_optimizer_instances", "parallel.gpus"),
                f"{instances} optimizer instances do not divide {number} {what}-parallel ranks",
                f"use a divisor of {number}",
            )


def optimizer_instances_are_of_a_divided_optimizer(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Undivided state has no instances.

    Megatron, first step: `Partial DistOpt cannot be used without DistOpt`
    (megatron/core/distributed/distributed_data_parallel.py:293).
    """
    parallel = recipe.parallel
    divided = parallel.use_distributed_optimizer or parallel.use_megatron_fsdp
    if (parallel.num_distributed_optimizer_instances or 1) > 1 and not divided:
        yield Violation(
            ("parallel.num_distributed_optimizer_instances", "parallel.use_distributed_optimizer"),
            "`parallel.num_distributed_optimizer_instances` needs `parallel.use_distributed_optimizer`",
            "add that, or unset this with `null`",
        )


def sharded_weights_have_their_format(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Megatron FSDP saves in a format of its own, and asks for it of a run that saves nothing too.

    Megatron, validate: 'Megatron-FSDP requires the `fsdp_dtensor` checkpointing format'
    (megatron/training/arguments.py:1146).
    """
    if recipe.parallel.use_megatron_fsdp and recipe.checkpoint.format != "fsdp_dtensor":
        yield Violation(
            ("parallel.use_megatron_fsdp", "checkpoint.format"),
            "`parallel.use_megatron_fsdp` needs `checkpoint.format: fsdp_dtensor`",
            "`checkpoint: {format: fsdp_dtensor}`",
        )


def sharded_weights_are_single(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Megatron FSDP cannot take apart the one tensor of all local experts.

    Megatron, validate: `Megatron-FSDP does not currently support moe_single_grouped_weight`
    (megatron/training/arguments.py:1119).
    """
    if recipe.parallel.use_megatron_fsdp and recipe.moe.single_grouped_weight:
        yield Violation(
            ("moe.single_grouped_weight", "parallel.use_megatron_fsdp"),
            "`moe.single_grouped_weight` excludes `parallel.use_megatron_fsdp`",
            "unset it with `null`",
        )


def a_sharding_is_switched_on(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """What Megatron FSDP divides means nothing without it.

    Megatron, never: the plain data parallelism does not look at it (seen on a CPU).
    """
    parallel = recipe.parallel
    sharded = parallel.use_megatron_fsdp or "--use-torch-fsdp2" in (recipe.megatron.extra or ())
    if parallel.data_sharding_strategy and parallel.data_sharding_strategy != "no_shard" and not sharded:
        yield Violation(
            ("parallel.data_sharding_strategy", "parallel.use_megatron_fsdp"),
            "`parallel.data_sharding_strategy` does nothing without `parallel.use_megatron_fsdp`",
            "add that, or unset this with `null`",
        )


def gpus_speak_nccl(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """gloo takes GPU tensors through the host, and lacks collectives of the divided optimizer. A warning: may be meant.

    Megatron, never: it hands the backend to torch (megatron/training/initialize.py).
    """
    if recipe.parallel.distributed_backend == "gloo" and recipe.runtime.device != "cpu":
        yield Violation(
            ("parallel.distributed_backend", "runtime.device"),
            "`parallel.distributed_backend: gloo` is for CPUs, and this run is on GPUs",
            "unset it with `null`",
            "warning",
        )


def generation_has_a_trainer_that_generates(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Only reinforcement learning generates.

    Megatron, never: pretraining does not look at it (megatron/training/training.py:1247).
    """
    if recipe.parallel.rl_inference_expert_model and "--perform-rl-step" not in (recipe.megatron.extra or ()):
        yield Violation(
            ("parallel.rl_inference_expert_model", "megatron.extra"),
            "`parallel.rl_inference_expert_model` does nothing in pretraining",
            "unset it with `null`",
        )


RULES: tuple[Rule, ...] = (
    the_world_is_given,
    ranks_divide_the_world,
    nodes_are_whole,
    pipeline_comes_last_in_the_order,
    context_ranks_cut_sequences,
    sequence_ranks_cut_sequences,
    an_exchange_is_said_for_every_layer,
    an_exchange_is_known,
    an_exchange_in_two_levels_has_their_sizes,
    exchanged_heads_are_whole,
    optimizer_instances_divide_copies,
    optimizer_instances_are_of_a_divided_optimizer,
    sharded_weights_have_their_format,
    sharded_weights_are_single,
    a_sharding_is_switched_on,
    gpus_speak_nccl,
    generation_has_a_trainer_that_generates,
)
