"""Which points Megatron may take, for all of them at once.

What is false here is refused by a rule of `moekit.recipe.rules`, whose name stands beside; what is true may still be
refused by another rule, which the search asks of the few that it would name. `tests/plan` holds the two together.
"""

from __future__ import annotations

import numpy as np

from moekit.plan.candidates import Flags
from moekit.plan.search.grid import KNOBS, Grid, Points
from moekit.plan.shape import Grouped, Shape
from moekit.recipe.rules.dispatch_libraries import DEEPEP_RANKS
from moekit.recipe.rules.violation import Target
from moekit.recipe.schema import Recipe


def legal(grid: Grid, shape: Shape, recipe: Recipe, target: Target, points: Points) -> Flags:
    """Whether each point is a layout. `# (candidate,)`"""
    fine = parallel_legal(grid, shape, recipe, points)
    fine &= savings_legal(grid, shape, recipe, target, points)
    return fine


def parallel_legal(grid: Grid, shape: Shape, recipe: Recipe, points: Points) -> Flags:
    """The same of ranks and micro batches, whatever is recomputed, moved or sent."""
    column = {knob: points[:, place] for place, knob in enumerate(KNOBS)}
    tensor, context = grid.values(points, "tensor"), grid.values(points, "context")
    pipeline = np.array([cut.pipeline for cut in grid.cuts])[column["pipeline"]]
    virtual = np.array([cut.virtual for cut in grid.cuts])[column["pipeline"]]
    micro = grid.values(points, "micro_batch")
    ranks = tensor * context * pipeline
    fine: Flags = grid.world % ranks == 0  # ranks_divide_the_world
    together = micro * np.maximum(grid.world // ranks, 1)
    fine &= grid.global_batch % together == 0  # micro_batches_fill_the_global_batch
    if "--microbatch-group-size-per-virtual-pipeline-stage" not in (recipe.megatron.extra or ()):
        interleaved = (virtual > 1) & (pipeline > 1)
        fine &= ~interleaved | (grid.global_batch // together % pipeline == 0)  # interleaving_has_its_micro_batches
    fine &= _divides(shape.attention.heads, tensor)  # heads_divide_over_tensor_ranks
    if isinstance(shape.attention, Grouped) and recipe.model.group_query_attention:
        groups = shape.attention.groups
        fine &= (groups % tensor == 0) | (tensor % groups == 0)  # query_groups_fit_tensor_ranks
    if shape.dense and "-" in "".join(shape.layers):
        fine &= _divides(shape.dense.width, tensor)  # widths_divide_over_tensor_ranks
    length = shape.seq_length or 0
    fine &= (context == 1) | (length % (2 * context) == 0)  # context_ranks_cut_sequences
    if shape.experts or grid.sequence:
        fine &= (tensor == 1) | (length % context != 0) | _divides(length // context, tensor)
        # sequence_ranks_cut_sequences
    return fine & _experts_legal(grid, shape, recipe, points, tensor, pipeline)


def _experts_legal(grid: Grid, shape: Shape, recipe: Recipe, points: Points, tensor: Points, pipeline: Points) -> Flags:
    fine = np.ones(len(points), bool)
    if shape.experts is None:
        return fine
    expert, expert_tensor = grid.values(points, "expert"), grid.values(points, "expert_tensor")
    fine &= _divides(shape.experts.number, expert)  # experts_divide_over_ranks
    fine &= grid.world % (expert * expert_tensor * pipeline) == 0  # expert_ranks_divide_the_world
    if width := recipe.moe.ffn_hidden_size:
        fine &= _divides(width, expert_tensor)  # experts_divide_over_tensor_ranks
    if not recipe.model.disable_bias_linear:
        fine &= expert_tensor == 1  # experts_cut_in_parts_have_no_bias
    if width := recipe.moe.shared_expert_intermediate_size:
        fine &= _divides(width, tensor)  # a_shared_expert_divides_over_tensor_ranks
    if recipe.moe.use_upcycling:
        fine &= expert_tensor == tensor  # upcycled_experts_are_cut_as_dense_layers
    return fine


def savings_legal(grid: Grid, shape: Shape, recipe: Recipe, target: Target, points: Points) -> Flags:
    """The same of recomputation, offloading, dispatcher and overlap, on ranks that are legal."""
    column = {knob: points[:, place] for place, knob in enumerate(KNOBS)}
    expert = grid.values(points, "expert")
    exchange = expert * grid.values(points, "expert_tensor")
    dispatcher = np.array(grid.dispatcher)[column["dispatcher"]]
    is_deepep, is_flex = dispatcher == "deepep", np.isin(dispatcher, ("deepep", "hybridep"))
    whole_moe = np.array(["moe" in one.modules for one in grid.recompute])[column["recompute"]]
    fine = np.ones(len(points), bool)
    if shape.experts:
        fine &= ~is_deepep | np.isin(exchange, DEEPEP_RANKS)
        # libraries_have_ranks_to_reach, deepep_is_configured_for_the_ranks
        if target.fabric == "efa":
            fine &= ~is_flex | (exchange <= target.gpus_per_node)  # expert_kernels_stay_in_a_node_on_efa
        if not recipe.precision.bf16:
            fine &= ~is_flex  # carriers_carry_bf16
    inside = np.array([bool({"moe_act", "expert_fc1"} & {*one}) for one in grid.offload])[column["offload"]]
    fine &= ~(inside & whole_moe)  # what_is_recomputed_is_not_offloaded
    return fine & (~np.array(grid.overlap)[column["overlap"]] | _overlap_legal(grid, shape, recipe, points, dispatcher))


def _overlap_legal(grid: Grid, shape: Shape, recipe: Recipe, points: Points, dispatcher: np.ndarray) -> Flags:
    column = {knob: points[:, place] for place, knob in enumerate(KNOBS)}
    blocking = np.array([one.granularity == "full" or "moe" in one.modules for one in grid.recompute])
    uncut = np.array([cut.pipeline > 1 and cut.virtual == 1 for cut in grid.cuts])
    fine = grid.values(points, "expert") > 1  # expert_overlap_has_an_exchange
    fine &= dispatcher != "allgather"
    fine &= ~blocking[column["recompute"]]  # expert_overlap_keeps_activations
    fine &= ~uncut[column["pipeline"]]  # expert_overlap_interleaves_its_stages
    half = bool(recipe.precision.bf16 or recipe.precision.fp16)  # expert_overlap_is_in_half_precision
    one_depth = (recipe.model.mtp_num_layers or 0) <= 1  # expert_overlap_predicts_one_token_more
    flat = recipe.model.hybrid_layer_pattern is None  # a_hybrid_stack_overlaps_no_micro_batches
    return fine & (half and one_depth and flat)


def _divides(number: int | Points, by: Points) -> Flags:
    divides: Flags = number % by == 0
    return divides
