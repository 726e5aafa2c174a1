"""`train`, `optimizer`, `schedule`, `data` and `checkpoint`: one run from its first token to its last."""

from dataclasses import dataclass
from typing import Annotated

from moekit.recipe.schema.markers import AtLeast, Flag, Owned
from moekit.recipe.schema.section import Section


@dataclass(init=False, repr=False, eq=False)
class Train(Section):
    """Batch, length, evaluation."""

    micro_batch_size: Annotated[int | None, Flag("--micro-batch-size", "2.4"), AtLeast(1)] = None
    """Sequences a data-parallel rank takes at a time."""
    global_batch_size: Annotated[int | None, Flag("--global-batch-size", "2.4"), AtLeast(1)] = None
    """Sequences in one optimizer step, over all ranks."""
    rampup_batch_size: Annotated[tuple[int, ...] | None, Flag("--rampup-batch-size")] = None
    """Three numbers: first batch, increment, samples of the ramp."""
    iters: Annotated[int | None, Flag("--train-iters", "2.4"), AtLeast(1)] = None
    """Optimizer steps of the full token budget. A short trial stops by `exit_interval`, which leaves the schedule."""
    samples: Annotated[int | None, Flag("--train-samples"), AtLeast(1)] = None
    """The budget in sequences instead of steps."""
    exit_interval: Annotated[int | None, Flag("--exit-interval", "2.4"), AtLeast(1)] = None
    """Stops after this step; the learning-rate schedule keeps its length."""
    seed: Annotated[int | None, Flag("--seed")] = None
    """Seed of weights, data order and dropout."""
    eval_interval: Annotated[int | None, Flag("--eval-interval"), AtLeast(1)] = None
    """Steps between validations."""
    eval_iters: Annotated[int | None, Flag("--eval-iters", "2.4"), AtLeast(0)] = None
    """Global batches in one validation; 0 turns it off."""
    calculate_per_token_loss: Annotated[bool | None, Flag("--calculate-per-token-loss")] = None
    """Gradients are divided by tokens and not by micro batches."""
    manual_gc: Annotated[bool | None, Flag("--manual-gc")] = None
    """Python's garbage collector runs on all ranks at the same step."""
    manual_gc_interval: Annotated[int | None, Flag("--manual-gc-interval"), AtLeast(0)] = None
    """Steps between collections with `manual_gc`."""


@dataclass(init=False, repr=False, eq=False)
class Optimizer(Section):
    """What turns gradients into steps."""

    name: Annotated[str | None, Flag("--optimizer", "3.6")] = None
    """Which optimizer. Null is Megatron's Adam."""
    weight_decay: Annotated[float | None, Flag("--weight-decay"), AtLeast(0)] = None
    """Decoupled weight decay."""
    adam_beta1: Annotated[float | None, Flag("--adam-beta1"), AtLeast(0)] = None
    """Adam's first moment."""
    adam_beta2: Annotated[float | None, Flag("--adam-beta2"), AtLeast(0)] = None
    """Adam's second moment."""
    adam_eps: Annotated[float | None, Flag("--adam-eps"), AtLeast(0)] = None
    """Adam's epsilon."""
    clip_grad: Annotated[float | None, Flag("--clip-grad"), AtLeast(0)] = None
    """Largest norm of the whole gradient; 0 turns clipping off."""
    muon_extra_scale_factor: Annotated[float | None, Flag("--muon-extra-scale-factor", "3.6"), AtLeast(0)] = None
    """Muon: multiplies its update so that it is as large as Adam's."""
    muon_momentum: Annotated[float | None, Flag("--muon-momentum"), AtLeast(0)] = None
    """Muon's momentum."""
    muon_num_ns_steps: Annotated[int | None, Flag("--muon-num-ns-steps"), AtLeast(1)] = None
    """Muon: Newton-Schulz steps."""
    muon_scale_mode: Annotated[str | None, Flag("--muon-scale-mode")] = None
    """Muon: how an update's size follows from the matrix's shape."""
    muon_tp_mode: Annotated[str | None, Flag("--muon-tp-mode")] = None
    """Muon: how matrices divided by tensor parallelism are treated."""
    use_precision_aware_optimizer: Annotated[bool | None, Flag("--use-precision-aware-optimizer")] = None
    """Lets the state's formats below differ from fp32."""
    main_grads_dtype: Annotated[str | None, Flag("--main-grads-dtype")] = None
    """Format of the main gradients."""
    main_params_dtype: Annotated[str | None, Flag("--main-params-dtype")] = None
    """Format of the main weights."""
    exp_avg_dtype: Annotated[str | None, Flag("--exp-avg-dtype")] = None
    """Format of Adam's first moment."""
    exp_avg_sq_dtype: Annotated[str | None, Flag("--exp-avg-sq-dtype")] = None
    """Format of Adam's second moment."""
    cpu_offload: Annotated[bool | None, Flag("--optimizer-cpu-offload")] = None
    """Optimizer state lives on the host."""
    offload_fraction: Annotated[float | None, Flag("--optimizer-offload-fraction"), AtLeast(0)] = None
    """Share of the state that `cpu_offload` moves, 0 to 1."""


@dataclass(init=False, repr=False, eq=False)
class Schedule(Section):
    """The learning rate over the run; its length is the token budget's, not a trial's."""

    lr: Annotated[float | None, Flag("--lr", "2.4"), AtLeast(0)] = None
    """Largest learning rate."""
    min_lr: Annotated[float | None, Flag("--min-lr"), AtLeast(0)] = None
    """Smallest learning rate, where decay ends."""
    decay_style: Annotated[str | None, Flag("--lr-decay-style", "2.4")] = None
    """Shape of the schedule. `WSD` is warmup, stable, decay and needs `wsd_decay_iters`."""
    decay_iters: Annotated[int | None, Flag("--lr-decay-iters"), AtLeast(1)] = None
    """Step at which decay ends. Null: `train.iters`."""
    wsd_decay_iters: Annotated[int | None, Flag("--lr-wsd-decay-iters"), AtLeast(1)] = None
    """WSD: steps of the decay at the end. Without it Megatron stops on a bare assert once the model is built."""
    wsd_decay_style: Annotated[str | None, Flag("--lr-wsd-decay-style")] = None
    """WSD: shape of the decay at the end."""
    warmup_iters: Annotated[int | None, Flag("--lr-warmup-iters", "2.4"), AtLeast(0)] = None
    """Steps from 0 to `lr`."""
    warmup_fraction: Annotated[float | None, Flag("--lr-warmup-fraction"), AtLeast(0)] = None
    """Warmup as a share of `decay_iters` instead of steps."""
    decay_samples: Annotated[int | None, Flag("--lr-decay-samples"), AtLeast(1)] = None
    """`decay_iters` in sequences, with `train.samples`."""
    wsd_decay_samples: Annotated[int | None, Flag("--lr-wsd-decay-samples"), AtLeast(1)] = None
    """`wsd_decay_iters` in sequences, with `train.samples`."""
    warmup_samples: Annotated[int | None, Flag("--lr-warmup-samples"), AtLeast(0)] = None
    """`warmup_iters` in sequences, with `train.samples`."""
    override_opt_param_scheduler: Annotated[bool | None, Flag("--override-opt-param-scheduler")] = None
    """On resume the recipe's schedule wins over the checkpoint's."""
    use_checkpoint_opt_param_scheduler: Annotated[bool | None, Flag("--use-checkpoint-opt-param-scheduler")] = None
    """On resume the checkpoint's schedule wins over the recipe's."""


@dataclass(init=False, repr=False, eq=False)
class Data(Section):
    """Which tokens; where they lie follows from the profile's `shared_root`."""

    name: Annotated[str | None, Owned(("--data-args-path", "--data-cache-path"), "2.3")] = None
    """The data set: `<shared_root>/data/<name>`, as `moekit data` prepares it, with its list `data-args.txt`."""
    shards: Annotated[tuple[str, ...] | None, Owned(("--data-path",), "2.3")] = None
    """Only these shards of `name`, each by its prefix without `.bin`. Null: all that the list names."""
    per_split: Annotated[bool | None, Owned(("--per-split-data-args-path",))] = None
    """Validation reads the shards that `moekit data manifest --held-out` keeps for it, and training the others; without
    `split`."""
    tokenizer: Annotated[str | None, Owned(("--tokenizer-model",), "2.3")] = None
    """The tokenizer: `<shared_root>/tokenizers/<tokenizer>`, the one the data was made with."""
    tokenizer_type: Annotated[str | None, Flag("--tokenizer-type", "2.3")] = None
    """Who reads it; `NullTokenizer` reads nothing and takes `vocab_size`."""
    vocab_size: Annotated[int | None, Flag("--vocab-size"), AtLeast(1)] = None
    """Token ids, before padding; for `NullTokenizer`."""
    null_tokenizer_eod_id: Annotated[int | None, Flag("--null-tokenizer-eod-id"), AtLeast(0)] = None
    """The end-of-document id of `NullTokenizer`."""
    mock_data: Annotated[bool | None, Flag("--mock-data")] = None
    """Made-up tokens: needs no data set."""
    split: Annotated[str | None, Flag("--split", "2.3")] = None
    """Shares of training, validation and test documents, such as `95,5,0`, in document order."""
    num_workers: Annotated[int | None, Flag("--num-workers"), AtLeast(0)] = None
    """Loader processes on each rank; 0 loads in the training process."""
    dataloader_type: Annotated[str | None, Flag("--dataloader-type")] = None
    """Sequential or reshuffled samples."""
    reset_position_ids: Annotated[bool | None, Flag("--reset-position-ids")] = None
    """Positions begin again at each document."""
    reset_attention_mask: Annotated[bool | None, Flag("--reset-attention-mask")] = None
    """Documents in one sequence do not see each other."""
    eod_mask_loss: Annotated[bool | None, Flag("--eod-mask-loss")] = None
    """No loss on end-of-document tokens."""
    no_create_attention_mask_in_dataloader: Annotated[bool | None, Flag("--no-create-attention-mask-in-dataloader")] = (
        None
    )
    """The attention kernel makes the mask, the loader does not send one."""
    no_mmap_bin_files: Annotated[bool | None, Flag("--no-mmap-bin-files")] = None
    """Reads shards without mapping them; a truncated one is then read as garbage without a word."""
    num_dataset_builder_threads: Annotated[int | None, Flag("--num-dataset-builder-threads"), AtLeast(1)] = None
    """Threads that build the index of many shards."""


@dataclass(init=False, repr=False, eq=False)
class Checkpoint(Section):
    """What is saved in the run's own `checkpoints/`, and what a run begins from."""

    save: Annotated[bool | None, Owned(("--save",), "3.0")] = None
    """Saves into the run directory; needs `save_interval`. Token counts and activation dumps are written there too."""
    save_interval: Annotated[int | None, Flag("--save-interval", "3.0"), AtLeast(1)] = None
    """Steps between checkpoints."""
    save_retain_interval: Annotated[int | None, Flag("--save-retain-interval"), AtLeast(1)] = None
    """Older checkpoints are kept only at multiples of this: Megatron deletes the one before each that it saves."""
    keep_last: Annotated[int | None, AtLeast(1)] = None
    """Checkpoints that stay: the newest so many. moekit deletes older ones, once so many newer ones are complete. Null:
    all stay."""
    keep_every: Annotated[int | None, AtLeast(1)] = None
    """Besides the `keep_last` newest, those at multiples of this stay for good."""
    from_run: Annotated[str | None, Owned(("--load",), "3.6")] = None
    """The run whose last checkpoint this one begins from, in its first start: `<shared_root>/runs/<from_run>`."""
    format: Annotated[str | None, Flag("--ckpt-format")] = None
    """On-disk format."""
    async_save: Annotated[bool | None, Flag("--async-save")] = None
    """Training goes on while a checkpoint is written."""
    fully_parallel_load: Annotated[bool | None, Flag("--ckpt-fully-parallel-load")] = None
    """Data-parallel ranks each load a part and exchange them."""
    no_fully_parallel_save: Annotated[bool | None, Flag("--no-ckpt-fully-parallel-save")] = None
    """Each data-parallel group saves through one rank."""
    assume_constant_structure: Annotated[bool | None, Flag("--ckpt-assume-constant-structure")] = None
    """Plans the save once for all checkpoints."""
    dist_strictness: Annotated[str | None, Flag("--dist-ckpt-strictness")] = None
    """What happens when keys are missing or left over at a load."""
    dist_optim_fully_reshardable: Annotated[bool | None, Flag("--dist-ckpt-optim-fully-reshardable")] = None
    """Optimizer state that loads under another layout."""
    finetune: Annotated[bool | None, Flag("--finetune")] = None
    """Loads weights alone and begins at step 0."""
    no_load_optim: Annotated[bool | None, Flag("--no-load-optim")] = None
    """Leaves the optimizer's state out of a load."""
    no_load_rng: Annotated[bool | None, Flag("--no-load-rng")] = None
    """Leaves the random state out of a load."""
    no_save_optim: Annotated[bool | None, Flag("--no-save-optim")] = None
    """Leaves the optimizer's state out of a checkpoint."""
    no_save_rng: Annotated[bool | None, Flag("--no-save-rng")] = None
    """Leaves the random state out of a checkpoint."""
    exit_on_missing: Annotated[bool | None, Flag("--exit-on-missing-checkpoint")] = None
    """Stops when there is nothing to load instead of starting from random weights. Null: a launch says it wherever it
    loads; false: it does not."""
