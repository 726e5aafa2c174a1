"""Megatron's own stages, in this process: parser, validation, configuration, schedule, process groups, model.

Everything here imports torch and Megatron and changes this process for good, so `moekit.megatron.real` calls it in a
process of its own. Line numbers are megatron-core 0.19.2's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

STAGES = ("parse", "validate", "config", "container", "schedule", "groups", "build")
"""What takes a fraction of a second, in order; stage `step` (`moekit.megatron.step`), seconds, runs when asked for."""

# What validation reads from the environment (arguments.py `validate_args`, determinism.py): the recipe's answer counts
# and not this machine's.
_READ_BY_MEGATRON = ("NCCL_", "NVTE_", "CUDA_DEVICE_", "PYTORCH_", "CUBLAS_", "TORCH_")

_SCRIPT = "pretrain_gpt.py"

# What pretrain_gpt.py passes to Megatron's `pretrain` as `args_defaults`.
_PRETRAIN_GPT_DEFAULTS = {"tokenizer_type": "GPT2BPETokenizer"}


@dataclass(frozen=True)
class Question:
    """A command line and the machine that it is judged for."""

    argv: Sequence[str]
    """Megatron's arguments, without the script."""
    world_size: int
    """Ranks of the whole run."""
    capability: tuple[int, int] = (9, 0)
    """Compute capability of the GPUs; (9, 0) is Hopper."""
    transformer_engine: str | None = "2.14.0"
    """The version that Megatron is told; None: Transformer Engine is not installed."""
    environment: Mapping[str, str] | None = None
    """The run's environment variables; of what Megatron reads, this process's own are not used."""
    stages: Sequence[str] = STAGES
    """Which stages to run: each needs those before it, save that `container` and `schedule` may be left out; `step`
    needs none, and runs where none of the others refuses."""


@dataclass
class Run:
    """What one stage leaves for the next."""

    question: Question
    args: Any = None
    config: Any = None
    model_config: Any = None


@dataclass(frozen=True)
class Parameters:
    """Parameter counts of the whole model."""

    total: int
    expert: int
    """Those of routed experts, all expert-parallel ranks together."""
    active: int
    """Those a token meets: all that are not experts (embeddings included) and `topk / num_experts` of the experts."""


def load(capability: tuple[int, int] = (9, 0)) -> None:
    """Import torch and Megatron, seconds; tensors that Megatron puts on a GPU go to the meta device from here on."""
    from moekit.job import cuda_on_cpu, local_hybrid

    cuda_on_cpu.install(device="meta", capability=capability)
    import megatron.training.argument_utils
    import megatron.training.arguments
    import megatron.training.initialize
    import megatron.training.models.gpt
    import megatron.training.training
    import torch
    from torch.testing._internal.distributed import fake_pg  # noqa: F401

    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)  # imports torch._dynamo, half a second
    _keep_parser(megatron.training.arguments)
    local_hybrid.install()


def _keep_parser(arguments: Any) -> None:
    """Make Megatron's parser of 800 options once, a quarter of a second, and not for every question."""
    from argparse import ArgumentParser

    parser: ArgumentParser = arguments.add_megatron_arguments(ArgumentParser(prog=_SCRIPT, allow_abbrev=False))

    def kept(_: ArgumentParser) -> ArgumentParser:
        # inprocess_restart.py: the only default that depends on the question
        parser.set_defaults(inprocess_active_world_size=int(os.environ["WORLD_SIZE"]))
        return parser

    arguments.add_megatron_arguments = kept


def pretend(question: Question) -> None:
    """Show Megatron the machine of the question: rank 0 of its world, GPU, Transformer Engine, environment."""
    from types import SimpleNamespace

    import torch

    for name in [name for name in os.environ if name.startswith(_READ_BY_MEGATRON)]:
        del os.environ[name]
    os.environ.update(question.environment or {})
    os.environ.update(WORLD_SIZE=str(question.world_size), RANK="0", LOCAL_RANK="0")
    major, minor = question.capability
    torch.cuda.get_device_capability = lambda *_: (major, minor)
    name = f"pretended GPU of capability {major}.{minor}"
    properties = SimpleNamespace(major=major, minor=minor, name=name, total_memory=80 << 30, multi_processor_count=132)
    torch.cuda.get_device_properties = lambda *_: properties
    if question.transformer_engine is not None:
        _pretend_transformer_engine(question.transformer_engine)


def _pretend_transformer_engine(version: str) -> None:
    """Answer Megatron's questions after Transformer Engine's version and after the fused functions it brings.

    Megatron keeps the version in a cache of its own (core/utils.py:317) and takes a fused function for missing where
    its name is None (core/models/common/embeddings/rope_utils.py:23, core/transformer/moe/moe_utils.py:43). No stage
    calls one: the model is built, not run.
    """
    import megatron.core.utils as core_utils
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.transformer.moe import moe_utils
    from packaging.version import Version

    core_utils._te_version = Version(version)
    for module in (rope_utils, moe_utils):
        for name in [name for name in vars(module) if name.startswith("fused_")]:
            if getattr(module, name) is None:
                setattr(module, name, _absent)


def _absent(*_: object, **__: object) -> None:
    raise RuntimeError("Transformer Engine is pretended here and has no functions")


def parse(run: Run) -> None:
    """Megatron's argparse (arguments.py `parse_args`)."""
    from megatron.training.arguments import parse_args

    sys.argv = [_SCRIPT, *run.question.argv]
    run.args = parse_args()


def validate(run: Run) -> None:
    """arguments.py `validate_args`."""
    from megatron.training.arguments import validate_args

    run.args = validate_args(run.args, dict(_PRETRAIN_GPT_DEFAULTS))


def config(run: Run) -> None:
    """`TransformerConfig` and its `__post_init__`."""
    from megatron.training.argument_utils import core_transformer_config_from_args

    run.config = core_transformer_config_from_args(run.args)


def container(run: Run) -> None:
    """The dataclasses of optimizer, data parallel, scheduler, checkpoint and the rest."""
    from megatron.training.argument_utils import pretrain_cfg_container_from_args

    whole = pretrain_cfg_container_from_args(run.args, _model_config(run))
    if hasattr(whole, "validate"):
        whole.validate()


def _model_config(run: Run) -> Any:
    """`GPTModelConfig` or `HybridModelConfig`, None where the vocabulary is the tokenizer's to say."""
    from megatron.training.argument_utils import gpt_config_from_args, hybrid_config_from_args

    if run.model_config is None and (run.args.vocab_size is not None or run.args.padded_vocab_size is not None):
        make = gpt_config_from_args if run.args.hybrid_layer_pattern is None else hybrid_config_from_args
        run.model_config = make(run.args, run.config)
    return run.model_config


def schedule(run: Run) -> None:
    """The number of microbatches and the learning rate scheduler, which Megatron builds only after the model."""
    import torch
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
    from megatron.training.global_vars import set_args
    from megatron.training.training import get_optimizer_param_scheduler

    args = run.args
    set_args(args)
    init_num_microbatches_calculator(  # as global_vars.py:127
        rank=args.rank,
        global_batch_size=args.global_batch_size,
        micro_batch_size=args.micro_batch_size,
        data_parallel_size=args.data_parallel_size * args.gtp_weight_remat_size,
        decrease_batch_size_if_needed=args.decrease_batch_size_if_needed,
        step_batch_size_schedule=args.step_batch_size_schedule,
        seq_length=args.seq_length,
    )
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    optimizer.param_groups[0].update(max_lr=args.lr, min_lr=args.min_lr, wd_mult=1.0, lr_mult=1.0)
    get_optimizer_param_scheduler(optimizer)


def groups(run: Run) -> None:
    """Every process group of rank 0 (initialize.py `_initialize_distributed`), on torch's fake backend."""
    import torch
    from megatron.training.global_vars import get_args, set_args
    from megatron.training.initialize import _initialize_distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    try:
        get_args()
    except AssertionError:
        set_args(run.args)
    run.args.use_gloo_process_groups = False  # gloo would look for the other ranks
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=run.args.world_size)
    _initialize_distributed(None, None, None)


def build(run: Run) -> Parameters | None:
    """The model of rank 0 on the meta device, of Megatron's local layers: the same parameters as Transformer Engine's.

    Counts parameters where one tensor- and pipeline-parallel rank holds them all, and gives None elsewhere.
    """
    import torch
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.training.models.gpt import GPTModelBuilder
    from megatron.training.models.hybrid import HybridModelBuilder

    model_parallel_cuda_manual_seed(1)
    if run.config.transformer_impl != "local":  # what the recipe asks of local layers is judged as it is
        run.config.persist_layer_norm = False
    run.config.transformer_impl, run.config.perform_initialization = "local", False
    for fusion in FUSIONS:
        setattr(run.config, fusion, False)
    vp_stage = None if run.args.virtual_pipeline_model_parallel_size is None else 0
    with torch.device("meta"):
        group = ProcessGroupCollection.use_mpu_process_groups()
        builder = GPTModelBuilder if run.args.hybrid_layer_pattern is None else HybridModelBuilder
        model = builder(_model_config(run)).build_model(group, vp_stage=vp_stage)
    return _count(model, run.args)


FUSIONS = (
    "apply_rope_fusion",
    "masked_softmax_fusion",
    "gradient_accumulation_fusion",
    "moe_permute_fusion",
    "moe_router_fusion",
)


def _count(model: Any, args: Any) -> Parameters | None:
    if (args.tensor_model_parallel_size, args.pipeline_model_parallel_size) != (1, 1):
        return None
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    expert = sum(size for name, size in sizes.items() if ".experts." in name)
    rest = sum(sizes.values()) - expert
    if not args.num_experts:
        return Parameters(rest, 0, rest)
    expert *= args.expert_model_parallel_size * (args.expert_tensor_parallel_size or 1)
    return Parameters(rest + expert, expert, rest + expert * args.moe_router_topk // args.num_experts)


RUNNERS: dict[str, Callable[[Run], Parameters | None]] = {
    "parse": parse,
    "validate": validate,
    "config": config,
    "container": container,
    "schedule": schedule,
    "groups": groups,
    "build": build,
}
