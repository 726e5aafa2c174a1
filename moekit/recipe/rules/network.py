"""Rules on what carries the ranks' exchange: connections to the GPU, NCCL, EFA, the experts' own kernels."""

from __future__ import annotations

from collections.abc import Iterator

from moekit.problems import shortened
from moekit.recipe.rules.dispatch import flex_library
from moekit.recipe.rules.violation import Rule, Target, Violation, is_blackwell, variable
from moekit.recipe.schema import Recipe
from moekit.recipe.sizes import exchange_ranks, expert_tensor_ranks

_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


def _is_said(name: str, recipe: Recipe, target: Target) -> bool:
    """Whether the recipe or the profile says something of a variable; otherwise a launch sets what Megatron wants."""
    return any(name in (environment or {}) for environment in (recipe.runtime.environment, target.environment))


def _fsdp(recipe: Recipe) -> str | None:
    """The field by which weights are fully sharded."""
    if recipe.parallel.use_megatron_fsdp:
        return "parallel.use_megatron_fsdp"
    return "megatron.extra" if "--use-torch-fsdp2" in (recipe.megatron.extra or ()) else None


def one_connection_orders_communication(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Before Blackwell, tensor and context parallelism need kernels to run in the order they were launched in.

    Megatron, validate: `require setting the environment variable CUDA_DEVICE_MAX_CONNECTIONS to 1`
    (megatron/training/arguments.py:1437).
    """
    parallel = recipe.parallel
    split = next((name for name in ("tensor_model", "context") if (getattr(parallel, name) or 1) > 1), None)
    free = is_blackwell(target) or _fsdp(recipe) or recipe.overlap.moe_expert_parallel_comm
    if split and not free and _is_said(_CONNECTIONS, recipe, target):
        value = variable(_CONNECTIONS, recipe, target)
        if value != "1":
            said = "is unset" if value is None else f"is {shortened(value)}"
            yield Violation(
                (f"runtime.environment.{_CONNECTIONS}", f"parallel.{split}"),
                f"{_CONNECTIONS} {said}, and `parallel.{split}: {getattr(parallel, split)}` needs 1 before Blackwell",
                "leave it out: a launch sets it where Megatron needs it",
            )


def sharding_needs_connections(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Fully sharded weights are gathered beside the computation, which one connection cannot do.

    Megatron, validate: `FSDP requires CUDA_DEVICE_MAX_CONNECTIONS > 1 or unset` (megatron/training/arguments.py:1014,
    1143).
    """
    if (field := _fsdp(recipe)) and variable(_CONNECTIONS, recipe, target) == "1":
        yield Violation(
            (f"runtime.environment.{_CONNECTIONS}", field),
            f"{_CONNECTIONS} is 1, and fully sharded data parallel needs more",
            "leave it out, or set it to 32",
        )


def overlap_needs_connections(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """With one connection the token exchange waits for the computation that should hide it.

    Megatron, never: the step is slower than it could be (megatron/training/arguments.py:1424).
    A warning: the losses are right, and tensor parallelism would rather have 1.
    """
    overlaps = recipe.overlap.moe_expert_parallel_comm and not is_blackwell(target)
    if overlaps and variable(_CONNECTIONS, recipe, target) == "1":
        yield Violation(
            (f"runtime.environment.{_CONNECTIONS}", "overlap.moe_expert_parallel_comm"),
            f"{_CONNECTIONS} is 1, and `overlap.moe_expert_parallel_comm` then hides little",
            "set it to 32",
            "warning",
        )


def nccl_finds_its_plugin(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """EFA is reached through NCCL's OFI plugin, chosen by its name: NCCL makes a library's name of it.

    Megatron, never: NCCL falls back to TCP sockets, 25 times slower over two nodes (handbook 2.2, 3.7).
    """
    plugin = variable("NCCL_NET_PLUGIN", recipe, target)
    if target.fabric != "efa" or plugin is None:
        return
    field = "runtime.environment.NCCL_NET_PLUGIN"
    if "/" in plugin:
        yield Violation(
            (field,),
            f"NCCL_NET_PLUGIN is a path, `{shortened(plugin)}`, of which NCCL makes a library that does not exist",
            "name it, `ofi`, and put its folder first in the profile's `library_path`",
        )
    elif plugin in _NOT_EFA:
        yield Violation(
            (field,),
            f"NCCL_NET_PLUGIN is `{plugin}`, which does not drive EFA, the network of {target.name}",
            "set it to `ofi`",
        )


_NOT_EFA = ("spcx", "none", "ucx", "sharp", "ib", "socket")
"""Plugins of other networks; NGC's images name `spcx`."""


def libfabric_takes_efa(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """The OFI plugin may reach EFA nodes over TCP too, where it is told to.

    Megatron, never: the exchange between nodes is slow (handbook 2.2).
    A warning: the losses are right.
    """
    told = {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1", "NCCL_NET": "AWS Libfabric"}
    for name, wanted in told.items():
        value = variable(name, recipe, target)
        if target.fabric == "efa" and value is not None and value not in (wanted, "Libfabric", "ofi"):
            yield Violation(
                (f"runtime.environment.{name}",),
                f"{name} is `{shortened(value)}`, which keeps NCCL off EFA, the network of {target.name}",
                f"set it to `{wanted}`",
                "warning",
            )


def expert_kernels_stay_in_a_node_on_efa(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """DeepEP and HybridEP reach other nodes through InfiniBand's own interface, which EFA does not have.

    Megatron, first step: `Illegal instruction` in HybridEP, time-outs in DeepEP
    (seen on EFA: Megatron-Bridge issue 3343).
    """
    moe, parallel = recipe.moe, recipe.parallel
    if moe.dispatcher != "flex" or target.fabric != "efa":
        return
    backend, width = flex_library(recipe), expert_tensor_ranks(recipe)
    if backend in ("deepep", "hybridep") and exchange_ranks(recipe) > target.gpus_per_node:
        sizes = f"`parallel.expert_model: {parallel.expert_model}`"
        sizes += f" times {width} ranks to an expert" * (width > 1)
        yield Violation(
            ("moe.flex_dispatcher_backend", "moe.dispatcher", "parallel.expert_model"),
            f"`{backend}` does not cross nodes on EFA, and {sizes} is more than the {target.gpus_per_node} GPUs of one",
            f"use `dispatcher: alltoall`, or at most {target.gpus_per_node // width} for `parallel.expert_model`",
        )


def gloo_takes_names(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """Megatron has groups of gloo beside NCCL's. NCCL takes patterns of interfaces, gloo whole names.

    Megatron, first step: before it, `Unable to find address for: ^lo` (gloo/transport/tcp/device.cc:84, seen on a CPU;
    aws-do-eks pull request 51).
    """
    value = variable(_GLOO, recipe, target)
    if value and value.startswith(("^", "=")) and "--disable-gloo-process-groups" not in (recipe.megatron.extra or ()):
        yield Violation(
            (f"runtime.environment.{_GLOO}",),
            f"{_GLOO} is `{shortened(value)}`, and gloo takes the name of an interface, no pattern",
            "name it, such as `eth0`, or unset it with `null`",
        )


_GLOO = "GLOO_SOCKET_IFNAME"


def nodes_do_not_meet_on_loopback(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """A node's `lo` reaches that node alone.

    Megatron, first step: before it, `Connection refused`, or ranks that wait for each other (NCCL issue 286).
    """
    if (recipe.parallel.gpus or 1) <= target.gpus_per_node:
        return
    for name in ("NCCL_SOCKET_IFNAME", _GLOO):
        value = variable(name, recipe, target)
        if value and {each.strip() for each in value.removeprefix("=").split(",")} == {"lo"}:
            yield Violation(
                (f"runtime.environment.{name}", "parallel.gpus"),
                f"{name} is `{shortened(value)}`, which no other of the nodes reaches",
                "name the interface between nodes, or unset it with `null`",
            )


def older_efa_takes_simple(recipe: Recipe, target: Target) -> Iterator[Violation]:
    """NCCL's LL and LL128 want data written in order, which EFA does from the nodes of H100 on.

    Megatron, never: sums may be wrong, or NaN (NCCL issue 716; aws-ofi-nccl pull request 280).
    A warning: the plugin says so too, in a line of the log.
    """
    value = variable("NCCL_PROTO", recipe, target)
    if target.fabric == "efa" and target.gpu == "a100" and value is not None and value.lower() != "simple":
        yield Violation(
            ("runtime.environment.NCCL_PROTO",),
            f"NCCL_PROTO is `{shortened(value)}`, which EFA of {target.gpu} nodes may corrupt",
            "unset it with `null`: the OFI plugin then sets `simple`",
            "warning",
        )


RULES: tuple[Rule, ...] = (
    one_connection_orders_communication,
    sharding_needs_connections,
    overlap_needs_connections,
    nccl_finds_its_plugin,
    libfabric_takes_efa,
    expert_kernels_stay_in_a_node_on_efa,
    gloo_takes_names,
    nodes_do_not_meet_on_loopback,
    older_efa_takes_simple,
)
