"""What one micro batch says of each MoE layer: a record a layer, each part of it numbers or `refused`, a reason.

step, time          Megatron's iteration from 1; seconds since the epoch
block, layer        `decoder` or `mtp`, and the layer's number in the whole model from 0
module              its name in this rank's part of the model
rank, experts       this rank, and the global numbers of the experts it holds; lists below are in their order
norms               rows, sum_l2: tokens and the sum of their outputs' L2 norms, of each expert; width: of a vector
flips               tokens: sampled; flipped: of those, which fp32 gives to another set of experts
dropped             assignments: those the router chose; dropped: those that the capacity took away
shared_over_routed  tokens; zero_routed: those without a routed part; sum, largest: of the ratios of the others' norms
zeros               zeros, elements: of the weight gradients of each expert; `zeros.py`
bias                smallest, largest, std: of the expert bias

Only the first forward of a layer in the step is looked at, in training, outside recomputation.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import Any, Callable, Iterator

MOST_TOKENS = 1024
"""Sampled for the comparison with fp32, at even distances."""


PADDED = ("moe_pad_expert_input_to_capacity", "moe_router_padding_for_quantization", "moe_router_padding_for_fp8")


class Refused(Exception):
    """What this run's settings do not let be measured, with the reason."""


class Sample:
    """One MoE layer's record while it comes together."""

    def __init__(self, module: Any, name: str) -> None:
        self.module, self.name = module, name
        mtp = bool(getattr(module.router, "is_mtp_layer", False)) or name.startswith("mtp.")
        self.record: dict[str, Any] = {
            "block": "mtp" if mtp else "decoder",
            "layer": int(module.layer_number) - 1,
            "module": name,
            "rank": rank(),
            "experts": [int(expert) for expert in module.local_expert_indices],
        }

    def measure(self, name: str, act: Callable[..., dict[str, Any]], *arguments: Any) -> None:
        """Put what `act` finds under `name`, once; a failure is put there too."""
        import hooks  # type: ignore[import-not-found]
        import torch

        if name in self.record or not self.module.training or hooks.recomputing():
            return
        try:
            with torch.no_grad(), untimed():
                self.record[name] = act(self.module, *arguments)
        except Refused as reason:
            self.record[name] = {"refused": str(reason)}
        except Exception as failure:
            self.record[name] = {"refused": f"{type(failure).__name__}: {failure}"}


def rank() -> int:
    """This process's, 0 where there is only one."""
    import torch

    return int(torch.distributed.get_rank()) if torch.distributed.is_initialized() else 0


@contextmanager
def untimed() -> Iterator[None]:
    """Megatron's timer of the log interval stands still, so that its TFLOP/s are those of the training."""
    from megatron.training import get_timers

    try:
        timer = get_timers()("interval-time")
        timer.stop()
    except Exception:  # it does not run: nothing is timed
        yield
        return
    try:
        yield
    finally:
        timer.start()


def watch(hooked: ExitStack, model: Any) -> list[Sample]:
    """Put the hooks on every MoE layer of this rank; `hooked` takes them off."""
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.utils import unwrap_model

    found = []
    for chunk in model:
        for name, module in unwrap_model(chunk).named_modules():
            if isinstance(module, MoELayer):
                sample = Sample(module, name)
                _watch_layer(hooked, sample)
                found.append(sample)
    return found


def _watch_layer(hooked: ExitStack, sample: Sample) -> None:
    module = sample.module
    if getattr(module.router, "expert_bias", None) is not None:
        sample.measure("bias", bias)

    def of_router(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        mask = args[1] if len(args) > 1 else kwargs.get("padding_mask")
        sample.measure("flips", flips, args[0], mask, output[1])
        sample.measure("dropped", dropped, mask, output[1])

    def of_experts(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        counts = args[1] if len(args) > 1 else kwargs["tokens_per_expert"]
        sample.measure("norms", norms, output[0], counts)

    for part, hook in ((module.router, of_router), (module.experts, of_experts)):
        hooked.callback(part.register_forward_hook(hook, with_kwargs=True).remove)
    if getattr(module, "shared_experts", None) is not None:
        _watch_branches(hooked, sample)


def _watch_branches(hooked: ExitStack, sample: Sample) -> None:
    """Compare the shared experts' output, gated, with the routed experts', combined, before they are added."""
    module = sample.module
    shared: list[Any] = []
    try:
        branches_apart(module.config)
    except Refused as reason:
        sample.record["shared_over_routed"] = {"refused": str(reason)}
        return

    def compare(routed: Any) -> None:
        if shared:
            sample.measure("shared_over_routed", shared_over_routed, shared.pop(), routed)

    def of_shared(_: Any, args: Any, output: Any) -> None:
        shared[:] = [output]

    hooked.callback(module.shared_experts.register_forward_hook(of_shared).remove)
    if module.config.moe_latent_size:
        hook = module.fc2_latent_proj.register_forward_hook(lambda _, args, output: compare(output[0]))
        hooked.callback(hook.remove)
        return
    dispatcher, combine = module.token_dispatcher, module.token_dispatcher.combine_postprocess

    def combine_and_compare(*arguments: Any) -> Any:
        output = combine(*arguments)
        compare(output)
        return output

    dispatcher.combine_postprocess = combine_and_compare
    hooked.callback(delattr, dispatcher, "combine_postprocess")


def eager(config: Any) -> None:
    """Raises Refused where hooks are not called for each micro batch in turn."""
    for name in ("enable_cuda_graph", "external_cuda_graph"):
        if getattr(config, name, False):
            raise Refused("CUDA graphs replay without hooks")
    if getattr(config, "cuda_graph_impl", "none") not in (None, "none"):
        raise Refused("CUDA graphs replay without hooks")
    if getattr(config, "overlap_moe_expert_parallel_comm", False):
        raise Refused("the overlap of the all-to-all runs two micro batches at once")


def unpadded(config: Any) -> None:
    """Raises Refused where the experts compute rows that are no tokens."""
    for name in PADDED:
        if getattr(config, name, False):
            raise Refused(f"`{name}` adds rows that are no tokens")


def branches_apart(config: Any) -> None:
    """Raises Refused where shared and routed experts cannot be told apart (handbook A.1)."""
    eager(config)
    unpadded(config)
    if config.moe_token_dispatcher_type != "alltoall":
        raise Refused(f"the dispatcher is `{config.moe_token_dispatcher_type}`, not `alltoall`")
    if config.tensor_model_parallel_size != 1 or (config.expert_tensor_parallel_size or 1) != 1:
        raise Refused("tensor parallelism splits what the branches give")
    if config.moe_shared_expert_overlap:
        raise Refused("`moe_shared_expert_overlap` adds the branches inside the dispatcher")
    if config.fp8 or getattr(config, "fp4", None):
        raise Refused("the experts are quantized")


def norms(module: Any, output: Any, counts: Any) -> dict[str, Any]:
    """Of `output` (rows, width), the rows of each local expert one after another."""
    import torch

    eager(module.config)
    unpadded(module.config)
    if (module.config.expert_tensor_parallel_size or 1) != 1:
        raise Refused("expert tensor parallelism: each rank has a part of every output, and parts have no norm")
    rows = [int(count) for count in counts.tolist()]
    if sum(rows) != output.shape[0]:
        raise Refused(f"{output.shape[0]} rows for {sum(rows)} tokens")
    each = torch.linalg.vector_norm(output.detach(), dim=1, dtype=torch.float32).double()
    sums = [float(part.sum()) for part in torch.split(each, rows)]
    return {"rows": rows, "sum_l2": sums, "width": int(output.shape[1])}


def flips(module: Any, hidden: Any, mask: Any, chosen: Any) -> dict[str, Any]:
    """Route some tokens of `hidden` (sequence, batch, width) again in fp32, and compare the sets.

    `chosen` (token, expert) is what the router chose; `mask` (sequence, batch) is True where there is no token. The
    rule is the router's own, as are weights and biases, at the precision they have (handbook A.1).
    """
    import torch
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
    from megatron.core.transformer.moe.router import TopKRouter

    router, config = module.router, module.config
    eager(config)
    if type(router) is not TopKRouter:
        raise Refused(f"the router is a `{type(router).__name__}`")
    unlike_the_rule(router, config)
    if chosen.dtype is not torch.bool:
        raise Refused("the router gives no routing map")
    rows = torch.arange(chosen.shape[0], device=chosen.device)
    if mask is not None:
        rows = rows[~mask.reshape(-1).bool()]
    rows = rows[:: max(1, -(-len(rows) // MOST_TOKENS))]
    tokens = hidden.detach().reshape(-1, hidden.shape[-1])[rows].float()
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        with torch.autocast(tokens.device.type, enabled=False):
            line = None if router.bias is None else router.bias.detach().float()
            logits = torch.nn.functional.linear(tokens, router.weight.detach().float(), line)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    _, exact = topk_routing_with_score_function(
        logits,
        router.topk,
        use_pre_softmax=config.moe_router_pre_softmax,
        num_groups=config.moe_router_num_groups,
        group_topk=config.moe_router_group_topk,
        scaling_factor=config.moe_router_topk_scaling_factor,
        score_function=router.score_function,
        expert_bias=router.expert_bias,
    )
    other = (exact != chosen[rows]).any(dim=1)
    return {"tokens": len(rows), "flipped": int(other.sum())}


def unlike_the_rule(router: Any, config: Any) -> None:
    """Raises Refused where a router does more than to take the best scores, which cannot be done again alone."""
    kinds = router.routing_type if isinstance(router.routing_type, list) else [router.routing_type]
    for kind in ("sinkhorn", "quantile_balancing"):
        if kind in kinds:
            raise Refused(f"`{kind}` routes all tokens together")
    for name in ("moe_expert_capacity_factor", "moe_input_jitter_eps", "moe_router_force_biased"):
        if getattr(config, name, None) is not None:
            raise Refused(f"`{name}` changes what is chosen")
    for name in ("moe_router_force_load_balancing", "moe_enable_routing_replay"):
        if getattr(config, name, False):
            raise Refused(f"`{name}` changes what is chosen")
    if getattr(config, "moe_num_hash_layers", None) and hasattr(router, "token_to_expert"):
        raise Refused("a hash layer chooses by the token")


def dropped(module: Any, mask: Any, chosen: Any) -> dict[str, Any]:
    """1 - kept / (tokens * topk), as its two numbers, from the router's last map `chosen` (token, expert)."""
    import torch

    eager(module.config)
    unpadded(module.config)
    if chosen.dtype is not torch.bool:
        raise Refused("the router gives no routing map")
    real = chosen if mask is None else chosen[~mask.reshape(-1).bool()]
    assignments = int(real.shape[0]) * int(module.router.topk)
    return {"assignments": assignments, "dropped": assignments - int(real.sum())}


def shared_over_routed(module: Any, shared: Any, routed: Any) -> dict[str, Any]:
    """The ratio of both branches' L2 norms, of each token; both (sequence, batch, width)."""
    import torch

    one, other = (
        torch.linalg.vector_norm(branch.detach(), dim=-1, dtype=torch.float32).reshape(-1).double()
        for branch in (shared, routed)
    )
    there = other > 0
    ratios = one[there] / other[there]
    return {
        "tokens": len(other),
        "zero_routed": len(other) - len(ratios),
        "sum": float(ratios.sum()),
        "largest": float(ratios.max()) if len(ratios) else None,
    }


def bias(module: Any) -> dict[str, Any]:
    """How far the expert biases lie apart."""
    values = module.router.expert_bias.detach().double()
    return {
        "smallest": float(values.min()),
        "largest": float(values.max()),
        "std": float(values.std(unbiased=False)),
    }
