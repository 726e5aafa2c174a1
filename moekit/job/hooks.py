"""What Megatron records: routing counts also without Transformer Engine, traces of training alone, no step unsaid.

Formats, files and moments are Megatron's (training/activation_logging.py, core/transformer/moe/router_trace.py); what
is changed here is which modules are heard, and when.
"""

from __future__ import annotations

import sys
from typing import Any

Installed = dict[str, str]


def install(trace_last_iters: int = 0) -> list[Installed]:
    """Put the hooks of this file, and those of `intervals`, into Megatron; the list of those it has a place for.

    `trace_last_iters`: besides its first iterations, trace this many of the last ones.
    """
    import intervals  # type: ignore[import-not-found]

    found = (tokens_per_expert(), routing_trace(trace_last_iters), metrics_before_checkpoint())
    return [*(done for done in found if done), *intervals.install()]


def recomputing() -> bool:
    """Whether this forward runs inside a backward pass: activations made anew, tokens that were counted before."""
    import torch

    return bool(torch._C._current_graph_task_id() != -1)


def tokens_per_expert() -> Installed | None:
    """Make `--save-tokens-per-expert-interval` count in local experts too, and each token once.

    Megatron hooks the grouped linear layers of Transformer Engine only; without them it says nothing and writes
    nothing. The local experts, SequentialMLP, get the same counts as their second argument. Where Megatron's own
    hooks found something, theirs are the only ones. Recomputed forwards, which would count tokens twice, are left out
    of both.
    """
    try:
        from megatron.core.transformer.moe.experts import SequentialMLP
        from megatron.training import activation_logging
    except ImportError:  # a Megatron without this option
        return None

    logger_class = activation_logging.ActivationLogger
    register, make_hook = logger_class.register_tpe_hooks, logger_class._make_tpe_hook

    def make_once(self: Any, chunk_name: str, module_name: str) -> Any:
        hook = make_hook(self, chunk_name, module_name)
        if hook is None:
            return None
        return lambda *call: None if recomputing() else hook(*call)

    def register_all(self: Any, model: Any) -> None:
        register(self, model)
        if self._tpe_hooks:
            return

        def hook_for(chunk_name: str, experts_name: str) -> Any:
            name = experts_name.replace(".mtp_model_layer.mlp.", ".mtp_model_layer.layers.0.mlp.") + ".linear_fc1"
            count = self._make_tpe_hook(chunk_name, name)
            return None if count is None else (lambda *call: count(*_as_grouped(*call)))

        self._tpe_hooks = activation_logging._register_hooks(model, (SequentialMLP,), hook_for)

    logger_class._make_tpe_hook, logger_class.register_tpe_hooks = make_once, register_all
    return {
        "name": "tokens_per_expert",
        "why": "Megatron counts tokens per expert in Transformer Engine's layers only, and recomputed ones twice",
        "source": "megatron/training/activation_logging.py: register_tpe_hooks",
    }


def _as_grouped(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> tuple[Any, ...]:
    """A call of SequentialMLP(hidden, tokens_per_expert, probs) as a grouped linear layer's (hidden, [count, ...])."""
    counts = kwargs["tokens_per_expert"] if "tokens_per_expert" in kwargs else args[1]
    return module, (None, counts.tolist()), {}, output


def routing_trace(last_iters: int) -> Installed | None:
    """Trace the first iterations and the last `last_iters`, and only what training routed.

    Megatron's tracer stops for good after `--moe-routing-trace-max-training-iters`. It also records evaluations, under
    the step of the iteration after, and recomputed forwards a second time.
    """
    try:
        from megatron.core.transformer.moe.router_trace import RouterTracer
    except ImportError:  # a Megatron without a tracer
        return None

    register, make_hook = RouterTracer.register_hooks, RouterTracer.make_hook
    advance, flush = RouterTracer.advance_step, RouterTracer.flush

    def register_hooks(self: Any, model: Any) -> None:
        self.moekit_model = model
        register(self, model)

    def make_training_hook(self: Any, *name: Any) -> Any:
        hook = make_hook(self, *name)
        return lambda router, *call: hook(router, *call) if router.training and not recomputing() else None

    def advance_step(self: Any, step_id: Any = None) -> None:
        advance(self, step_id)
        if not self.training_mode or step_id is None:
            return
        from megatron.training import get_args

        args = get_args()
        end = end_iteration(args.iteration, args.train_iters, args.exit_interval)
        if end - last_iters <= step_id + 1 < end:
            self._stopped = False
            if not self._hook_handles:
                register(self, self.moekit_model)

    def flush_whole_steps(self: Any) -> None:
        self.records.clear()  # of a step that did not come to its end
        flush(self)

    RouterTracer.register_hooks, RouterTracer.make_hook = register_hooks, make_training_hook
    RouterTracer.advance_step, RouterTracer.flush = advance_step, flush_whole_steps
    last = f", and the last {last_iters} iterations are traced too" if last_iters else ""
    return {
        "name": "routing_trace",
        "why": f"Megatron traces evaluations and recomputed forwards as training; they are left out{last}",
        "source": "megatron/core/transformer/moe/router_trace.py: RouterTracer",
    }


def metrics_before_checkpoint() -> Installed | None:
    """Write a step's metrics before its checkpoint: an attempt that is killed in between leaves no step unsaid."""
    from megatron.training import training

    save = getattr(training, "save_checkpoint_and_time", None)
    if save is None:
        return None

    def flush_and_save(*args: Any, **kwargs: Any) -> Any:
        sys.modules["wandb"].flush()
        return save(*args, **kwargs)

    training.save_checkpoint_and_time = flush_and_save
    return {
        "name": "metrics_before_checkpoint",
        "why": "a step's metrics are written when the next step has some, which may never come once it is saved",
        "source": "megatron/training/training.py: save_checkpoint_and_time",
    }


def end_iteration(start: int, train_iters: int, exit_interval: int | None) -> int:
    """How many iterations are done when a run that starts at `start` ends; `--exit-interval` ends it at a multiple."""
    if not exit_interval:
        return train_iters
    return min(train_iters, (start // exit_interval + 1) * exit_interval)
