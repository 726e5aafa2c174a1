"""Stage `step`: the first three iterations of Megatron's own trainer, as rank 0 of the world, on the CPU.

The other ranks are torch's fake process group: shapes and code paths are the run's, collectives move nothing, so losses
say nothing of training; but they are the same to the last bit whenever the same command line is asked. Like
`moekit.megatron.stages`, this changes its process for good. Line numbers are megatron-core 0.19.2's.
"""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from moekit.job import gpt
from moekit.megatron.cpu_limits import cpu_limits
from moekit.megatron.stages import FUSIONS
from moekit.megatron.verdict import Verdict, refusal

ITERATIONS = 3
PARAMETERS_AT_MOST = 30_000_000
TOKENS_AT_MOST = 8192
"""Of one micro batch."""
WORK_AT_MOST = 2e11
"""Parameters times tokens of one iteration on one rank: some ten seconds of a core."""

_VOCABULARY = 1024
"""In the place of a tokenizer's that may not be here."""

# Limits that do not keep a step from being judged: Megatron itself refuses what is in their way.
_JUDGED_ANYWAY = ("MoE with tensor parallel",)


@dataclass
class Steps:
    """What the iterations came to, floats exactly as Megatron has them."""

    losses: list[float] = field(default_factory=list)
    """Of each iteration; none on a pipeline stage that is not the last."""
    grad_norms: list[float] = field(default_factory=list)


class _Done(BaseException):
    """Enough iterations: no `except Exception` of Megatron's may catch it."""


def not_judged(args: Any) -> tuple[str, str] | None:
    """What of these validated arguments has no step on a CPU, and why."""
    values = vars(args)
    for limit in cpu_limits(values):
        if limit.build != "replaced" and limit.feature not in _JUDGED_ANYWAY:
            return limit.feature, limit.reason
    for dest, feature, reason in _NO_STEP:
        if values.get(dest):
            return feature, reason
    if find_spec("megatron.core.datasets.helpers_cpp") is None:
        return "dataset helpers", "this Megatron's are not compiled (`make -C megatron/core/datasets`)"
    tokens, parameters = args.seq_length * args.micro_batch_size, _parameters(args)
    batch = args.global_batch_size / (args.micro_batch_size * args.data_parallel_size)
    if parameters > PARAMETERS_AT_MOST:
        return "size", f"about {parameters / 1e6:.0f} million parameters on a rank are too many for a CPU"
    if tokens > TOKENS_AT_MOST or parameters * tokens * batch > WORK_AT_MOST:
        return "size", f"{batch:.0f} micro batches of {tokens} tokens are too many for a CPU"
    return None


_NO_STEP = (
    ("moe_use_upcycling", "checkpoint", "upcycling starts from a dense checkpoint"),
    ("use_checkpoint_args", "checkpoint", "the checkpoint says what is trained"),
    ("pretrained_checkpoint", "checkpoint", "training starts from a checkpoint"),
    ("optimizer_cuda_graph", "CUDA graphs", "a CPU has none"),
    ("gpu_sniff_test_interval", "GPU sniff test", "it times what GPUs do"),
    ("nccl_ub", "NCCL user buffers", "they are GPU memory"),
    ("save_activations_interval", "activation dumps", "they look for Transformer Engine's layers"),
    ("save_dgrads_interval", "activation dumps", "they look for Transformer Engine's layers"),
    ("perform_rl_step", "reinforcement learning", "it needs an inference engine"),
    *((dest, "training script", "it takes the script of a Megatron-LM checkout") for dest in gpt.OF_A_CHECKOUT),
)


def _parameters(args: Any) -> float:
    """About how many parameters rank 0 holds."""
    hidden, layers = args.hidden_size, args.num_layers / args.pipeline_model_parallel_size
    tensor, gates = args.tensor_model_parallel_size, 3 if args.swiglu else 2
    attention = (args.num_attention_heads * (args.kv_channels or 0) or hidden) * hidden * 4 / tensor
    dense = gates * hidden * (args.ffn_hidden_size or 4 * hidden) / tensor
    experts = 0.0
    if args.num_experts:
        width = args.moe_ffn_hidden_size or args.ffn_hidden_size or 4 * hidden
        cut = args.expert_model_parallel_size * (args.expert_tensor_parallel_size or tensor)
        shared = gates * hidden * (args.moe_shared_expert_intermediate_size or 0) / tensor
        experts = args.num_experts * gates * hidden * width / cut + shared
    embeddings = 2 * (args.padded_vocab_size or args.vocab_size or _VOCABULARY) * hidden / tensor
    return float(layers * (attention + max(dense, experts)) + embeddings)


def step(args: Any, folder: Path) -> Steps:
    """Train `args` (validated) for three iterations; what the run writes goes below `folder`, the working directory."""
    import torch
    from megatron.core.datasets import utils
    from megatron.core.enums import ModelType
    from megatron.training import training
    from megatron.training.argument_utils import pretrain_cfg_container_from_args
    from megatron.training.global_vars import set_global_variables

    from moekit.job import cuda_on_cpu

    os.chdir(folder)
    torch.set_num_threads(1)
    cuda_on_cpu.put_tensors_on("cpu")
    utils.compile_helpers = lambda: None  # they are there, and this machine need not have a compiler
    _empty_is_zero(torch)
    _empty_exchanges(torch)
    _at_the_desk(args, folder)
    steps = Steps()
    _watch(training, steps)

    def data(sample_counts: Any, vp_stage: int | None = None) -> Any:
        enough = (ITERATIONS + 1) * args.global_batch_size
        return gpt.datasets([count and min(count, enough) for count in sample_counts], vp_stage)

    data.is_distributed = True  # type: ignore[attr-defined]  # as in gpt.main
    set_global_variables(args)
    config = pretrain_cfg_container_from_args(args, gpt.model_config(args))
    try:
        training.pretrain(
            config,
            data,
            ModelType.encoder_or_decoder,
            gpt.forward_step,
            get_embedding_ranks=gpt.embedding_ranks,
        )
    except _Done:
        pass
    except SystemExit as end:
        if end.code:
            raise
    return steps


def prepare() -> None:
    """Import what a step needs besides `stages.load`, seconds: before the forks, so that not each of them does."""
    import numpy.random  # noqa: F401
    from megatron.core.datasets import gpt_dataset
    from megatron.core.tokenizers import text  # noqa: F401  transformers, where it is installed

    gpt_dataset.MockGPTLowLevelDataset.size = 2000  # documents; an index of 100,000 takes half a second


def _at_the_desk(args: Any, folder: Path) -> None:
    """Leave out of validated arguments what is not of this machine: the other ranks, the GPU's layers, files."""
    # arguments.py:1701, what validation makes of --fake-process-group.
    args.fake_process_group, args.check_for_nan_in_loss_and_grad, args.use_gloo_process_groups = True, False, False
    args.check_for_spiky_loss = args.check_for_large_grads = False
    if args.transformer_impl != "local":  # what the recipe asks of local layers is judged as it is
        args.transformer_impl, args.no_persist_layer_norm = "local", True
    for fusion in FUSIONS:
        setattr(args, fusion, False)
    args.mock_data, args.num_workers = True, 0
    for dest in _READ:
        setattr(args, dest, None)
    if args.tokenizer_type != "NullTokenizer":
        args.tokenizer_type, args.null_tokenizer_eod_id = "NullTokenizer", 0
        args.vocab_size = args.vocab_size or _VOCABULARY
    for dest in _WRITTEN:
        if getattr(args, dest, None):
            setattr(args, dest, str(folder / dest))
    for dest in _OFF:
        setattr(args, dest, False)
    # PyTorch's profiler only starts on a GPU; steps that it cannot have, it refuses before that.
    args.profile = args.profile and args.use_pytorch_profiler and args.profile_step_end <= args.profile_step_start
    args.wandb_project = ""
    if not args.multiple_validation_sets:
        args.eval_iters, args.full_validation, args.split = 0, False, "1,0,0"


_READ = (
    *("data_path", "data_args_path", "train_data_path", "valid_data_path", "test_data_path"),
    *("per_split_data_args_path", "object_storage_cache_path", "load", "metadata_path"),
)
_WRITTEN = (
    *("save", "tensorboard_dir", "data_cache_path", "moe_routing_trace_path", "config_logger_dir"),
    *("flight_recorder_dump_path", "logits_save_dir", "memory_snapshot_path", "non_persistent_global_ckpt_dir"),
    *("non_persistent_local_ckpt_dir", "result_rejected_tracker_filename", "rl_profile_dir", "wandb_save_dir"),
)
_OFF = ("record_memory_history", "async_save", "run_workload_inspector_server")


def _watch(training: Any, steps: Steps) -> None:
    """Note each iteration's result, and end the run where Megatron would next think of a checkpoint."""
    train_step = training.train_step

    def noted(*args: Any, **kwargs: Any) -> Any:
        result = train_step(*args, **kwargs)
        losses, norm = result[0], result[5]
        if "lm loss" in losses:
            steps.losses.append(float(losses["lm loss"]))
        if norm is not None:
            steps.grad_norms.append(float(norm))
        return result

    def decide(model: Any, optimizer: Any, scheduler: Any, iteration: int, *_: Any, **__: Any) -> bool:
        if iteration >= ITERATIONS:
            raise _Done
        return False

    training.train_step, training.checkpoint_and_decide_exit = noted, decide


def _empty_exchanges(torch: Any) -> None:
    """Let the fake process group exchange nothing: torch refuses sizes that real ranks, which are routed alike, keep.

    Rank 0 counts its own tokens for all ranks; where none of them goes to its experts it sends nothing back, and is
    told of as many as it sent.
    """
    exchange = torch.distributed.all_to_all_single

    def all_to_all_single(output: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
        if output.numel() and input.numel():
            return exchange(output, input, *args, **kwargs)
        nothing, others = output[:0], {name: to for name, to in kwargs.items() if not name.endswith("split_sizes")}
        return exchange(nothing, nothing, **others)  # `async_op` wants something to wait for

    torch.distributed.all_to_all_single = all_to_all_single


def _empty_is_zero(torch: Any) -> None:
    """Make `torch.empty` give zeros: what the fake process group "receives" is then the same in every run."""

    def zeroed(make: Callable[..., Any]) -> Callable[..., Any]:
        def make_zeros(*args: Any, **kwargs: Any) -> Any:
            with torch.no_grad():
                return make(*args, **kwargs).zero_()

        return make_zeros

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        setattr(owner, name, zeroed(getattr(owner, name)))


def answer_to(stage: str, problem: BaseException, printed: str = "") -> Verdict:
    """The verdict of a stage that ended with `problem`: refused, or not judged where it comes of having no GPU."""
    verdict, feature = refusal(stage, problem, printed), cpu_lacks(problem)
    return replace(verdict, answer="not_judged", feature=feature) if feature else verdict


def cpu_lacks(problem: BaseException) -> str | None:
    """What only a GPU or a package of the GPU's image has, where `problem` comes from its absence."""
    one: BaseException | None = problem
    while one is not None:
        if isinstance(one, ImportError) and not (one.name or "").startswith("megatron"):
            package = (one.name or "").partition(".")[0]
            return f"package {package}" if package else "a package"
        one = one.__cause__ or one.__context__
    if type(problem) is NameError:  # a name of Transformer Engine's that was imported if it could be
        return f"name {problem.name}"
    last = traceback.extract_tb(problem.__traceback__)[-1:]
    if isinstance(problem, RuntimeError) and last and last[0].filename.endswith("/layer_wise_optimizer.py"):
        return "the other ranks' parameters"  # gathered in unequal parts, which the fake process group takes as its own
    return next((feature for pattern, feature in _LACKS if re.search(pattern, str(problem))), None)


_LACKS = (
    (r"Transformer ?Engine .*(is pretended|is required|is not available|is not installed)", "Transformer Engine"),
    (r"not implemented for '(Half|BFloat16|Float8\w*)'", "a kernel"),
    (r"Could not run 'aten::|Torch not compiled with CUDA|Found no NVIDIA driver|No CUDA GPUs", "a kernel"),
    (r"^_create_internal\(\): incompatible function arguments", "NCCL's own options"),  # of the fake process group
    (r"\d active drivers", "a Triton kernel"),
    (r"expected m1 and m2 to have the same dtype", "mixed number formats"),  # the local layers cast nothing
    (r"invalid gradient at index \d+ - got \[0, 0, 0\]", "a real pipeline neighbour"),  # nothing was received
    (r"^Invalid (beta parameter|learning rate|epsilon value|weight_decay)", "fused Adam"),  # torch's checks, not its
)
