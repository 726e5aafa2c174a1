"""Upcycling made to work: `--moe-use-upcycling`, an MoE that begins as copies of a dense run's feed-forward layers.

Megatron 0.19.2 and its main branch fail at it (Megatron-LM pull request 3646). Whether a defect is there is read in the
functions' own text, so each repair steps aside where upstream, or `moekit megatron patch`, has mended it. Line numbers
are megatron-core 0.19.2's; docs/upcycling.md says what is done.
"""

from __future__ import annotations

import copy
import inspect
import sys
from pathlib import Path
from typing import Any, Callable

Installed = dict[str, str]

# What is wrong, as the functions have it: white space is of no account.
WRONG_NAME = "'model': dense_model_for_upcycling,"
MOE_MODEL = "dense_model_for_upcycling = _build_model_wrapper(wrap_with_ddp=True)"
MODEL_OF_CONTAINER = "cfg = cfg_container model_config = cfg.model builder_cls"
SWAPPED = "_convert_to_moe_state_dict( dense_model[i].state_dict(), moe_model[i] )"


def install() -> list[Installed]:
    """Repair what this start needs: the conversion where it is asked for, or the start after one that ended early."""
    found = [resume()]
    if "--moe-use-upcycling" in sys.argv:
        found += [loader_argument(), dense_model(), model_chunks()]
    return [done for done in found if done]


def has(function: Callable[..., Any], fragment: str) -> bool:
    """Whether the text of a function has a fragment, whatever the white space."""
    return " ".join(fragment.split()) in " ".join(inspect.getsource(function).split())


def loader_argument() -> Installed | None:
    """Give the dense model to `load_checkpoint` by the name of its parameter, `ddp_model`, and not as `model`."""
    from megatron.core.transformer.moe import upcycling_utils
    from megatron.training import checkpointing, training

    parameters = inspect.signature(checkpointing.load_checkpoint).parameters
    if "model" in parameters or not has(training.setup_model_and_optimizer, WRONG_NAME):
        return None
    upcycle, name = upcycling_utils.load_and_upcycle_model, next(iter(parameters))

    def load_and_upcycle_model(*models: Any, load_kwargs: dict[str, Any], **others: Any) -> Any:
        renamed = {name if key == "model" else key: value for key, value in load_kwargs.items()}
        return upcycle(*models, load_kwargs=renamed, **others)

    upcycling_utils.load_and_upcycle_model = load_and_upcycle_model
    return {
        "name": "upcycling_loader_argument",
        "why": "the dense model is given to load_checkpoint as `model`, which it does not know",
        "source": "megatron/training/training.py: setup_model_and_optimizer",
    }


def dense_model() -> Installed | None:
    """Build the dense model from a dense configuration: from the run's own, it is an MoE again.

    Megatron makes its arguments dense meanwhile (training.py:2157), but builds from the configuration that was made of
    them before. Whoever asks for it meanwhile gets its dense twin.
    """
    from megatron.training import training

    setup = training.setup_model_and_optimizer
    if not (has(setup, MOE_MODEL) and has(setup, MODEL_OF_CONTAINER)):
        return None

    def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("cfg_container") is not None:
            kwargs["cfg_container"] = _Container(kwargs["cfg_container"])
        return setup(*args, **kwargs)

    training.setup_model_and_optimizer = setup_model_and_optimizer
    return {
        "name": "upcycling_dense_model",
        "why": "the dense model is built from the MoE's configuration, so the dense checkpoint does not fit it",
        "source": "megatron/training/training.py: setup_model_and_optimizer",
    }


class _Container:
    """The run's configuration, whose model is dense while Megatron's arguments are."""

    def __init__(self, whole: Any) -> None:
        self._whole = whole

    def __getattr__(self, name: str) -> Any:
        from megatron.training import get_args

        value = getattr(self._whole, name)
        return dense_twin(value, get_args()) if name == "model" and get_args().num_experts is None else value


def dense_twin(model: Any, args: Any) -> Any:
    """The configuration of an MoE model as that of the dense one, of the widths in Megatron's dense arguments.

    A copy with some fields set: a new configuration without experts may have no other of their fields. A list of layers
    with experts would give a checkpoint's layers other names (core/transformer/transformer_block.py:740).
    """
    twin = copy.copy(model)
    twin.transformer = copy.copy(model.transformer)
    twin.transformer.num_moe_experts, twin.transformer.moe_layer_freq = None, 1
    twin.transformer.expert_model_parallel_size = args.expert_model_parallel_size
    twin.transformer.ffn_hidden_size = args.ffn_hidden_size
    return twin


def model_chunks() -> Installed | None:
    """Convert each chunk of a virtual pipeline from its dense one: the two are given the wrong way round."""
    from megatron.core.transformer.moe import upcycling_utils

    if not has(upcycling_utils.upcycle_state_dict, SWAPPED):
        return None
    convert, of_one = upcycling_utils._convert_to_moe_state_dict, upcycling_utils.upcycle_state_dict

    def upcycle_state_dict(moe_model: Any, dense_model: Any) -> Any:
        if len(moe_model) == 1:
            return of_one(moe_model, dense_model)
        chunks = zip(moe_model, dense_model, strict=True)
        return {f"model{index}": convert(moe, dense) for index, (moe, dense) in enumerate(chunks)}

    upcycling_utils.upcycle_state_dict = upcycle_state_dict
    return {
        "name": "upcycling_model_chunks",
        "why": "with a virtual pipeline, dense and MoE models are given the wrong way round (pull request 5442)",
        "source": "megatron/core/transformer/moe/upcycling_utils.py: upcycle_state_dict",
    }


def resume() -> Installed | None:
    """Go on from a conversion as the run that made it would have: at iteration 0, with an optimizer that is new.

    Megatron saves the converted model as iteration 1 without optimizer and schedule (training.py:2182), and trains on
    from iteration 0. A run that ends before its first own checkpoint finds only this one, which does not load.
    """
    from megatron.training import get_args, training

    folder = _value(sys.argv, "--load")
    if "--moe-use-upcycling" in sys.argv or folder is None or not is_conversion(Path(folder)):
        return None
    load = training.load_checkpoint

    def load_checkpoint(*args: Any, **kwargs: Any) -> tuple[int, int]:
        known = get_args()
        before, known.no_load_optim = known.no_load_optim, True
        load(*args, **kwargs)
        known.no_load_optim = before
        return 0, 0  # iteration and operations, as after the conversion

    training.load_checkpoint = load_checkpoint
    return {
        "name": "upcycling_resume",
        "why": "the checkpoint is an upcycled model that has not been trained: without optimizer state, at iteration 0",
        "source": "megatron/training/training.py: setup_model_and_optimizer",
    }


def is_conversion(folder: Path) -> bool:
    """Whether the last checkpoint in a folder is what upcycling saves: iteration 1, without the schedule."""
    from megatron.core import dist_checkpointing

    tracker, checkpoint = folder / "latest_checkpointed_iteration.txt", folder / "iter_0000001"
    if not tracker.is_file() or tracker.read_text().strip() != "1":
        return False
    if not dist_checkpointing.check_is_distributed_checkpoint(str(checkpoint)):
        return False
    state = dist_checkpointing.load_common_state_dict(str(checkpoint))
    saved = state.get("args")
    by_choice = getattr(saved, "no_save_optim", None)
    return bool(getattr(saved, "moe_use_upcycling", False)) and not by_choice and "opt_param_scheduler" not in state


def _value(argv: list[str], option: str) -> str | None:
    """The word behind an option, the last time it is said."""
    places = [index for index, word in enumerate(argv[:-1]) if word == option]
    return argv[places[-1] + 1] if places else None
