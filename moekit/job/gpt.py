"""Pretraining on the `megatron.training` of the megatron-core wheel, which ships no `pretrain_gpt.py` of its own.

On tokens, of a GPT or a hybrid stack: no packed sequences, no supervised fine-tuning, no fill-in-the-middle, no
distillation. Written for 0.19.2; a GPT's losses equal those of a checkout's script to the last bit
(tests/job/test_losses.py).
Shapes: (batch, sequence) for tokens, labels, loss mask and positions.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

_LOADED = time.time()
OF_A_CHECKOUT = (
    *("sft", "fim_data", "per_dataset_sequences_path", "dataloader_inter_document_masking"),
    *("hybrid_context_parallel", "logits_load_dir"),
)
"""Arguments that only the script of a Megatron-LM checkout looks at."""
_BATCH = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")


def main() -> None:
    """Parse Megatron's arguments from `sys.argv` and train; SystemExit for one that takes a checkout's script."""
    from megatron.core.enums import ModelType
    from megatron.training import inprocess_restart, pretrain, set_startup_timestamps
    from megatron.training.argument_utils import pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    set_startup_timestamps(program_start=_LOADED, main_entry=time.time())
    train, store = inprocess_restart.maybe_wrap_for_inprocess_restart(pretrain)
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
    if refused := [f"`--{name.replace('_', '-')}`" for name in OF_A_CHECKOUT if getattr(args, name, None)]:
        what = f"{', '.join(refused)}: the installed megatron-core would ignore this"
        raise SystemExit(f"{what}; a Megatron-LM checkout (MOEKIT_MEGATRON) runs it")
    config = pretrain_cfg_container_from_args(args, model_config(args))
    datasets.is_distributed = True  # type: ignore[attr-defined]  # every rank asks; `builds_data` decides
    train(
        config, datasets, ModelType.encoder_or_decoder, forward_step, store=store, get_embedding_ranks=embedding_ranks
    )


def model_config(args: Any) -> Any:
    """What is built: a hybrid stack where there is a layer pattern, Megatron's only sign of one, else a GPT."""
    from megatron.training.argument_utils import gpt_config_from_args, hybrid_config_from_args

    return gpt_config_from_args(args) if args.hybrid_layer_pattern is None else hybrid_config_from_args(args)


def forward_step(data: Any, model: Any, return_schedule_plan: bool = False) -> tuple[Any, Any]:
    """One micro batch through `model`: its output (on the last stage, losses by token) and what reduces it.

    `return_schedule_plan`: the plan of the layers instead, for `--overlap-moe-expert-parallel-comm`.
    """
    from megatron.core.utils import get_attr_wrapped_model
    from megatron.training import get_timers

    timer = get_timers()("batch-generator", log_level=2)
    timer.start()
    tokens, labels, loss_mask, attention_mask, positions = batch(data, get_attr_wrapped_model(model, "vp_stage"))
    timer.stop()
    forward = model.build_schedule_plan if return_schedule_plan else model
    output = forward(tokens, positions, attention_mask, labels=labels, loss_mask=loss_mask)
    return output, partial(loss, loss_mask)


def batch(data: Any, vp_stage: int | None) -> tuple[Any, ...]:
    """The tensors of `_BATCH` for this rank (under context parallelism its part of the sequence), or None."""
    from megatron.core import mpu
    from megatron.core.utils import get_batch_on_this_cp_rank, get_batch_on_this_tp_rank
    from megatron.training import get_args

    args = get_args()
    if not has_data(vp_stage):
        return (None,) * len(_BATCH)
    tensors: dict[str, Any] = {}
    if mpu.get_tensor_model_parallel_rank() == 0:  # the others receive it below
        sample = next(data)
        # The keys of packed sequences must be there, and are None.
        packed = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen", "local_cp_size", "hybrid_cp_group")
        tensors = dict.fromkeys(packed)
        for key in _BATCH:
            tensor = sample.get(key)
            tensors[key] = None if tensor is None else tensor.cuda(non_blocking=True)
    tensors = get_batch_on_this_tp_rank(
        tensors,
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=has_mtp(vp_stage),
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    tensors = get_batch_on_this_cp_rank(tensors, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group())
    return tuple(tensors[key] for key in _BATCH)


def loss(loss_mask: Any, output: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Sum of the losses of the tokens that count, how many count, and both for the log.

    `output`: losses by token, (batch, sequence). With `--check-for-nan-in-loss-and-grad` a NaN or infinity ends the
    job.
    """
    import torch
    from megatron.core.rerun_state_machine import get_rerun_state_machine
    from megatron.training import get_args

    mask = loss_mask.view(-1).float()
    total = torch.sum(output.view(-1).float() * mask)
    tokens = mask.sum().detach().to(torch.int)
    rerun, args = get_rerun_state_machine(), get_args()
    checks: list[tuple[Any, str, bool]] = []
    if args.check_for_nan_in_loss_and_grad:
        checks += [(torch.isnan, "NaN in the loss of this rank", True)]
        checks += [(torch.isinf, "infinity in the loss of this rank", True)]
    if args.check_for_spiky_loss:
        jump = partial(rerun.is_unexpectedly_large, threshold=10, context="loss")
        checks += [(jump, "loss over ten times the largest before", False)]
    for bad, message, fatal in checks:
        rerun.validate_result(result=total, rejection_func=bad, message=message, tolerance=0.0, fatal=fatal)
    return total, tokens, {"lm loss": torch.cat([total.detach().clone().view(1), tokens.view(1)])}


def datasets(sample_counts: Any, vp_stage: int | None = None) -> Any:
    """Training, validation and test data of `sample_counts` samples each, None for those this rank has no use for."""
    from megatron.core import mpu
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
    from megatron.training import get_args, get_tokenizer
    from megatron.training.utils import get_blend_and_blend_per_split

    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=get_tokenizer(),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        object_storage_cache_path=args.object_storage_cache_path,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
        fast_cache_load=args.dataloader_fast_cache_load,
        defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
        context_parallel_size=args.context_parallel_size,
        data_parallel_size=args.data_parallel_size,
        sequence_parallel_size=args.tensor_model_parallel_size * args.sequence_parallel,
    )

    def builds_data() -> bool:
        return mpu.get_tensor_model_parallel_rank() == 0 and has_data(vp_stage)

    kind = MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(kind, sample_counts, builds_data, config).build()


def has_mtp(vp_stage: int | None) -> bool:
    """Whether this stage holds a multi-token prediction block, which needs tokens like the first stage."""
    from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank
    from megatron.training import get_args
    from megatron.training.arguments import core_transformer_config_from_args

    if not get_args().mtp_num_layers:
        return False
    config = core_transformer_config_from_args(get_args())
    return bool(
        mtp_on_this_rank(
            layout=config.pipeline_model_parallel_layout,
            mtp_num_layers=config.mtp_num_layers,
            ignore_virtual=False,
            vp_stage=vp_stage,
        )
    )


def has_data(vp_stage: int | None) -> bool:
    """Whether this stage reads tokens or labels."""
    from megatron.training.utils import is_first_or_last_pipeline_stage

    return bool(is_first_or_last_pipeline_stage(vp_stage)) or has_mtp(vp_stage)


def embedding_ranks(pipeline_ranks: list[int]) -> list[int]:
    """The ranks of a pipeline that hold a word embedding: the first, the last where it is tied, those of MTP."""
    from megatron.core.transformer.multi_token_prediction import get_mtp_ranks
    from megatron.training import get_args
    from megatron.training.arguments import core_transformer_config_from_args

    args = get_args()
    ranks = {pipeline_ranks[0]}
    if len(pipeline_ranks) > 1:
        if not args.untie_embeddings_and_output_weights:
            ranks.add(pipeline_ranks[-1])
        ranks.update(get_mtp_ranks(pipeline_ranks, core_transformer_config_from_args(args)))
    return sorted(ranks)
