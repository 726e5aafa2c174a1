"""`log`, `monitor`, `resilience`, `profile` and `runtime`: what a run tells, survives and needs around it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from moekit.recipe.schema.markers import AtLeast, Flag, Owned
from moekit.recipe.schema.section import Section


@dataclass(init=False, repr=False, eq=False)
class Log(Section):
    """Scalars: printed, and sent to TensorBoard and Trackio."""

    interval: Annotated[int | None, Flag("--log-interval"), AtLeast(1)] = None
    """Steps between printed lines."""
    tensorboard_interval: Annotated[int | None, Flag("--tensorboard-log-interval"), AtLeast(1)] = None
    """Steps between logged scalars."""
    moe_per_layer: Annotated[bool | None, Flag("--moe-per-layer-logging", "3.0")] = None
    """Router losses of each layer and not only their mean: which layer misbehaves."""
    throughput: Annotated[bool | None, Flag("--log-throughput", "3.0")] = None
    """TFLOP/s of each GPU."""
    params_norm: Annotated[bool | None, Flag("--log-params-norm", "3.0")] = None
    """Norm of all weights."""
    num_zeros_in_grad: Annotated[bool | None, Flag("--log-num-zeros-in-grad", "3.0")] = None
    """How many gradient elements are exactly zero."""
    max_attention_logit: Annotated[bool | None, Flag("--log-max-attention-logit", "3.0")] = None
    """Largest attention logit; needs Transformer Engine 2.9 or later."""
    memory_to_tensorboard: Annotated[bool | None, Flag("--log-memory-to-tensorboard", "2.4")] = None
    """Allocated and reserved GPU memory."""
    timers_to_tensorboard: Annotated[bool | None, Flag("--log-timers-to-tensorboard")] = None
    """The timers' values, iteration time and throughput among them."""
    validation_ppl_to_tensorboard: Annotated[bool | None, Flag("--log-validation-ppl-to-tensorboard")] = None
    """Validation perplexity."""
    memory_interval: Annotated[int | None, Flag("--log-memory-interval"), AtLeast(1)] = None
    """Steps between printed memory reports."""
    progress: Annotated[bool | None, Flag("--log-progress")] = None
    """Keeps a progress file beside the checkpoints."""
    timing_level: Annotated[int | None, Flag("--timing-log-level", "3.6")] = None
    """How much is timed: 0 the step, 1 its parts, 2 every call."""
    timing_option: Annotated[str | None, Flag("--timing-log-option", "3.6")] = None
    """Over ranks: the slowest, both ends, or all."""


@dataclass(init=False, repr=False, eq=False)
class Monitor(Section):
    """What is captured besides scalars, and the checks that watch the run."""

    tokens_per_expert_interval: Annotated[int | None, Flag("--save-tokens-per-expert-interval", "3.0"), AtLeast(1)] = (
        None
    )
    """Steps between counts of the tokens each expert received; written below `checkpoint.save`."""
    activations_interval: Annotated[int | None, Flag("--save-activations-interval", "3.0"), AtLeast(1)] = None
    """Steps between activation dumps; written below `checkpoint.save`."""
    params_interval: Annotated[int | None, Flag("--save-params-interval"), AtLeast(1)] = None
    """Steps between weight dumps; written below `checkpoint.save`."""
    wgrads_interval: Annotated[int | None, Flag("--save-wgrads-interval"), AtLeast(1)] = None
    """Steps between weight-gradient dumps; written below `checkpoint.save`."""
    dgrads_interval: Annotated[int | None, Flag("--save-dgrads-interval"), AtLeast(1)] = None
    """Steps between data-gradient dumps; written below `checkpoint.save`."""
    routing_trace: Annotated[bool | None, Owned(("--moe-routing-trace-path",), "3.0")] = None
    """Records which experts every token chose, in the attempt's `routing/`; bound it with the fields below."""
    routing_trace_max_training_iters: Annotated[
        int | None, Flag("--moe-routing-trace-max-training-iters", "3.0"), AtLeast(1)
    ] = None
    """Steps traced from each start. Null is Megatron's: every step, without end."""
    routing_trace_last_iters: Annotated[int | None, AtLeast(1)] = None
    """Steps traced once more at the end of `train.iters`, by moekit's hook. Null: only the start."""
    routing_trace_capture_logits: Annotated[bool | None, Flag("--moe-routing-trace-capture-logits", "A.1")] = None
    """The trace keeps the router's logits too."""
    routing_trace_capture_hidden_states: Annotated[
        bool | None, Flag("--moe-routing-trace-capture-hidden-states", "A.1")
    ] = None
    """The trace keeps the router's inputs too."""
    routing_trace_dump_weights: Annotated[bool | None, Flag("--moe-routing-trace-dump-weights", "A.1")] = None
    """The trace keeps the router's weights too."""
    diagnose_interval: Annotated[int | None, AtLeast(1)] = None
    """Steps between diagnostic ones: expert norms, routing in fp32, dropped assignments, zeros in gradients; written to
    the attempt's `diagnostics/`, by moekit's hook. Null: none."""
    check_for_spiky_loss: Annotated[bool | None, Flag("--check-for-spiky-loss", "3.6")] = None
    """A loss far over the last ones is treated as a fault."""
    check_for_large_grads: Annotated[bool | None, Flag("--check-for-large-grads", "3.6")] = None
    """A gradient far over the last ones is treated as a fault."""
    no_check_for_nan_in_loss_and_grad: Annotated[bool | None, Flag("--no-check-for-nan-in-loss-and-grad", "A.1")] = None
    """Turns the NaN check off, which is on by itself."""
    gpu_sniff_test_interval: Annotated[int | None, Flag("--gpu-sniff-test-interval", "2.1"), AtLeast(1)] = None
    """Steps between short tests of each GPU's arithmetic and speed."""
    control_run: str | None = None
    """The run of the same folder whose routing is forced to be even: its TFLOP/s are what balancing is measured by."""
    alert_loss_above_best: Annotated[float | None, AtLeast(0)] = None
    """Alert when the LM loss, mean of 10 logged steps, is so many nats above its best, and beyond noise. Null: 0.1;
    0: never, nor on NaN."""
    alert_max_vio: Annotated[float | None, AtLeast(0)] = None
    """Alert when MaxVio is above this while the balancing loss reads as even. Null: 1, twice an even share; 0: never
    an alert."""
    alert_aux_near_floor: Annotated[float | None, AtLeast(0)] = None
    """How far above its floor, which is 1, a balancing loss still reads as even. Null: 0.05; 0: never an alert."""
    alert_aux_under_floor: Annotated[float | None, AtLeast(0)] = None
    """Alert when a balancing loss is so far under its floor. Null: 0.05; 0: never."""
    alert_z_loss_rise: Annotated[float | None, AtLeast(0)] = None
    """Alert when the root of the z-loss, RMS logsumexp, is so much above its lowest. Null: 2; 0: never."""
    alert_expert_norm: Annotated[float | None, AtLeast(0)] = None
    """Alert when the largest expert norm over the median rises, or the smallest falls, by this factor. Null: 10;
    0: never."""
    alert_dead_expert_counts: Annotated[int | None, AtLeast(0)] = None
    """Alert when an expert has no token in so many counted steps in a row. Null: 5; 0: never."""
    alert_tflops_gap: Annotated[float | None, AtLeast(0)] = None
    """Alert when TFLOP/s are so large a part under those of `monitor.control_run`. Null: 0.1; 0: never."""
    alert_socket: bool | None = None
    """Alert when NCCL uses TCP sockets between nodes. Null: true."""


@dataclass(init=False, repr=False, eq=False)
class Resilience(Section):
    """What happens when a step or a machine goes wrong."""

    rerun_mode: Annotated[str | None, Flag("--rerun-mode", "3.6")] = None
    """Whether a faulty step is run again to tell a bad GPU from a bad loss."""
    exit_signal_handler: Annotated[bool | None, Flag("--exit-signal-handler")] = None
    """Saves and ends when the scheduler's signal comes."""
    exit_signal: Annotated[str | None, Flag("--exit-signal")] = None
    """The signal it waits for."""
    exit_duration_in_mins: Annotated[int | None, Flag("--exit-duration-in-mins"), AtLeast(1)] = None
    """Saves and ends after so many minutes."""
    requeue: bool | None = None
    """The job puts itself back into the queue as long as the run can go on. Null: `moekit resume` does it by hand."""
    max_attempts: Annotated[int | None, AtLeast(1)] = None
    """Starts of the run, over all. Null: 100."""


@dataclass(init=False, repr=False, eq=False)
class Profile(Section):
    """A profile of a few steps on a few ranks."""

    enabled: Annotated[bool | None, Flag("--profile", "3.7")] = None
    """Profiles the steps below."""
    use_pytorch_profiler: Annotated[bool | None, Flag("--use-pytorch-profiler", "3.7")] = None
    """PyTorch's profiler instead of Nsight Systems."""
    step_start: Annotated[int | None, Flag("--profile-step-start", "3.7"), AtLeast(0)] = None
    """First step profiled."""
    step_end: Annotated[int | None, Flag("--profile-step-end", "3.7"), AtLeast(1)] = None
    """The step before which it ends."""
    ranks: Annotated[tuple[int, ...] | None, Flag("--profile-ranks", "3.7")] = None
    """Ranks that are profiled."""
    record_memory_history: Annotated[bool | None, Flag("--record-memory-history", "3.7")] = None
    """Records every allocation of the last rank, with its stack."""
    record_shapes: Annotated[bool | None, Flag("--record-shapes")] = None
    """The profile names the tensors' shapes."""


@dataclass(init=False, repr=False, eq=False)
class Runtime(Section):
    """Where and how the processes run; nothing here is Megatron's."""

    device: Literal["gpu", "cpu"] | None = None
    """`cpu` trains on this machine's processor, through the same Megatron. Null: GPUs."""
    time_limit_min: Annotated[int | None, AtLeast(1)] = None
    """Minutes the scheduler gives the job. Null: the profile's."""
    environment: Mapping[str, str | None] | None = None
    """Environment variables of the training processes, over the profile's; a null entry unsets one."""
    secrets: tuple[str, ...] | None = None
    """Names of variables, such as `HF_TOKEN`, handed on from the launching shell; their values are never written."""
