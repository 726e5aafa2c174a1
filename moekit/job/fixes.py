"""Repairs of Megatron's own defects, each with its reason; each steps aside where the defect is not there.

Every repair is a function that returns what it did, or None. Versions are told apart by what they contain, not by their
number: a checkout may carry any.
"""

from __future__ import annotations

import inspect
import os
import signal
import sys
from pathlib import Path
from typing import Any


def install() -> list[dict[str, str]]:
    """Repair what needs it in the Megatron on `sys.path`; the list of what was done."""
    repairs = (dataset_helpers, optimizer_resume, fp32_resume, orphans, exit_signal)
    return [done for repair in repairs if (done := repair())]


def dataset_helpers() -> dict[str, str] | None:
    """Take the wheel's compiled dataset helpers for compiled.

    `_compile_dependencies` runs `make` in megatron/core/datasets without asking. The wheel ships the built extension
    but no Makefile, so `make` fails and `compile_helpers` ends the job with exit code 1. Steps aside where there is
    one.
    """
    from megatron.core.datasets import utils

    if Path(utils.__file__).with_name("Makefile").exists():
        return None

    def compile_helpers() -> None:
        from megatron.core.datasets import helpers_cpp  # noqa: F401  a broken install fails here, as early as `make` did

    utils.compile_helpers = compile_helpers
    return {
        "name": "dataset_helpers",
        "why": "the wheel has its dataset helpers built, without the Makefile that Megatron runs to build them",
        "source": "megatron/core/datasets/utils.py: compile_helpers",
    }


def optimizer_resume() -> dict[str, str] | None:
    """Let the distributed optimizer load its checkpoint when torch's own AdamW is the inner one.

    With neither Transformer Engine nor Apex, Adam's step count lives in each parameter's state, and loading breaks:

    1. `state_dict` reads that count from the state; before a load there is none and it asserts;
    2. `load_state_dict` gives all parameters one and the same step tensor, so each of them counts for all;
    3. the parameter state is then copied over it, with the step of the empty template (dp_reshardable), or a KeyError
       since it has none (fully_reshardable). The right step is the parameter groups', loaded before.

    Steps aside where Transformer Engine or Apex brings the optimizer.
    """
    from megatron.core.optimizer import distrib_optimizer

    if getattr(distrib_optimizer, "HAVE_APEX_OR_TE", True):
        return None
    import torch

    optimizer_class = distrib_optimizer.DistributedOptimizer
    save, load = optimizer_class.state_dict, optimizer_class.load_state_dict
    copy_in = optimizer_class._set_main_param_and_optimizer_states

    def state_dict(self: Any) -> Any:
        state = self.optimizer.state
        if state:
            return save(self)
        parameter = next(p for group in self.optimizer.param_groups for p in group["params"])
        state[parameter] = {"step": torch.tensor(0.0)}
        try:
            return save(self)
        finally:
            state.clear()

    def load_state_dict(self: Any, saved: Any) -> None:
        load(self, saved)
        for state in self.optimizer.state.values():
            state["step"] = state["step"].clone()

    def copy_without_step(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        copy_in(self, model_param, {**tensors, "step": None})

    optimizer_class.state_dict, optimizer_class.load_state_dict = state_dict, load_state_dict
    optimizer_class._set_main_param_and_optimizer_states = copy_without_step
    return {
        "name": "optimizer_resume",
        "why": "the distributed optimizer cannot load its checkpoint without Transformer Engine or Apex",
        "source": "megatron/core/optimizer/distrib_optimizer.py: state_dict, load_state_dict",
    }


def fp32_resume() -> dict[str, str] | None:
    """Let the distributed optimizer load the checkpoint of a model in fp32, on any device.

    Its parameters are then views of the model's own, which want gradients, and the checkpoint's are copied over them
    without `torch.no_grad`: `a view of a leaf Variable that requires grad is being used in an in-place operation`.
    Steps aside where the copy is made without gradients.
    """
    from megatron.core.optimizer import distrib_optimizer

    optimizer_class = distrib_optimizer.DistributedOptimizer
    before, _, body = inspect.getsource(optimizer_class).partition("    def _set_main_param_and_optimizer_states(")
    if "no_grad" in before.rpartition("\n\n")[2] + body.partition("\n    def ")[0]:
        return None
    import torch

    copy_in = optimizer_class._set_main_param_and_optimizer_states
    optimizer_class._set_main_param_and_optimizer_states = torch.no_grad()(copy_in)
    return {
        "name": "fp32_resume",
        "why": "the distributed optimizer cannot load the checkpoint of a model in fp32",
        "source": "megatron/core/optimizer/distrib_optimizer.py: _set_main_param_and_optimizer_states",
    }


def orphans() -> dict[str, str]:
    """Let the processes that Megatron writes checkpoints with end when their rank is killed.

    From its first save on, a rank has a helper of half a gigabyte, a multiprocessing manager, which waits for it for
    ever. A helper looks once a second whether its rank is still its parent.
    """
    from multiprocessing import util

    spawn = util.spawnv_passfds

    def spawn_looking(path: bytes, words: Any, fds: Any) -> Any:
        if "--multiprocessing-fork" in words:  # behind the program that `-c` gives
            there = f"iter(lambda: os.getppid() == {os.getpid()}, False)"
            look = (
                "import os, threading, time; threading.Thread(daemon=True, target=lambda: "
                f"any(time.sleep(1) for _ in {there}) or os._exit(1)).start(); "
            )
            words = [*words[:-2], look + words[-2], words[-1]]
        return spawn(path, words, fds)

    util.spawnv_passfds = spawn_looking  # type: ignore[assignment]
    return {
        "name": "orphans",
        "why": "the process that Megatron hands its checkpoints to stays behind where its rank is killed",
        "source": "megatron/core/dist_checkpointing/strategies/filesystem_async.py: get_write_results_queue",
    }


def exit_signal() -> dict[str, str] | None:
    """Let the processes that Megatron writes checkpoints with outlive the signal to save and end.

    Slurm sends it to every process of a step. From its first save on, a rank has a helper, a multiprocessing manager,
    which the signal kills; the save that was asked for then fails with a BrokenPipeError. Helpers are started with the
    signals blocked that may be meant; the rank itself still ends them, by SIGKILL.
    """
    if "--exit-signal-handler" not in sys.argv:
        return None
    from multiprocessing import popen_spawn_posix, util

    meant = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
    spawn = util.spawnv_passfds

    def spawn_deaf(*arguments: Any) -> Any:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, meant)
        try:
            return spawn(*arguments)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    util.spawnv_passfds = spawn_deaf  # type: ignore[assignment]
    popen_spawn_posix.Popen.terminate = popen_spawn_posix.Popen.kill  # type: ignore[method-assign]
    return {
        "name": "exit_signal",
        "why": "the signal to save and end also ends the process that Megatron hands its checkpoints to",
        "source": "megatron/core/dist_checkpointing/strategies/filesystem_async.py: get_write_results_queue",
    }
