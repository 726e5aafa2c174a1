"""What a checkpoint says of itself, read without torch: its files, and the arguments it was trained with.

Checkpoints are pickles. Here no code of a pickle is run: whatever class or function it names becomes an object that
only holds attributes. Formats as in megatron/core/dist_checkpointing/serialization.py and torch/distributed/checkpoint
(torch_dist, torch_dcp, fsdp_dtensor), and megatron/training/checkpointing.py (torch). Also for Python 3.9.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import gc
import io
import pickle
import re
import zipfile
from pathlib import Path
from typing import IO, Any, Dict, Iterator, List, Tuple

_COMMON = "common_state/"
"""How Megatron calls the object with its arguments among the stored ones, `common_state/shard_0_1`."""

_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")

_SCHEDULE = (
    *("lr", "min_lr", "lr_decay_style", "lr_decay_iters", "lr_decay_samples"),
    *("lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction"),
    *("lr_wsd_decay_iters", "lr_wsd_decay_samples", "lr_wsd_decay_style"),
    *("weight_decay", "start_weight_decay", "end_weight_decay", "weight_decay_incr_style"),
    *("train_iters", "train_samples"),  # the weight decay's length is theirs, and is compared even where it is constant
)
_BATCH = ("global_batch_size", "micro_batch_size", "rampup_batch_size", "seq_length")
_LAYOUT = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    *("expert_model_parallel_size", "expert_tensor_parallel_size"),
    *("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"),
    *("num_layers", "hidden_size", "num_attention_heads", "num_experts"),
)
_OWN_CHOICE = ("--override-opt-param-scheduler", "--use-checkpoint-opt-param-scheduler")
"""Options that say whose schedule wins; without one Megatron stops where the two differ
(megatron/core/optimizer_param_scheduler.py: _check_and_set)."""


Parts = Dict[str, List[Tuple[str, int, int]]]
"""What is stored: by its name, the file, offset and length in bytes of each part of it."""


class UnreadableError(Exception):
    """A file that is no whole pickle, or no whole archive of torch's."""


class _Stub:
    """In the place of any class or function: it keeps the attributes it is given, and does nothing when called,
    appended to or indexed."""

    def __new__(cls, *_: Any, **__: Any) -> _Stub:
        return object.__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)

    def _nothing(self, *_: Any, **__: Any) -> _Stub:
        return _Stub()

    append = extend = add = __call__ = __setitem__ = _nothing


_HARMLESS = {
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("argparse", "Namespace"): argparse.Namespace,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return _HARMLESS.get((module, name), _Stub)

    def persistent_load(self, _: Any) -> None:
        """A tensor's storage, which lies in other members of torch's archive."""


def _unpickled(file: IO[bytes], name: str) -> Any:
    collects = gc.isenabled()
    gc.disable()  # millions of objects are made, and none of them is garbage
    try:
        return _Unpickler(file).load()
    except OSError:
        raise
    except Exception as failure:  # a broken pickle raises almost anything
        raise UnreadableError(f"`{name}` is no whole pickle ({type(failure).__name__})") from None
    finally:
        if collects:
            gc.enable()


def unzipped(file: IO[bytes], name: str) -> Any:
    """What `torch.save` wrote, without its tensors' numbers."""
    try:
        with zipfile.ZipFile(file) as archive:
            member = next(member for member in archive.namelist() if member.endswith("data.pkl"))
            data = archive.read(member)
    except (zipfile.BadZipFile, StopIteration, EOFError, NotImplementedError, RuntimeError):
        raise UnreadableError(f"`{name}` is cut off, or no file of torch's") from None
    return _unpickled(io.BytesIO(data), name)


def stored(folder: Path) -> Parts:
    """What a distributed checkpoint's `.metadata` says is stored.

    Raises:
        UnreadableError: it is no whole pickle of torch's.
        OSError: it cannot be read.
    """
    found: Parts = {}
    for index, part in _places(folder):
        found.setdefault(index.get("fqn", ""), []).append(part)
    return found


def first_indices(folder: Path, ending: str) -> dict[str, list[tuple[int, tuple[str, int, int]]]]:
    """Of what is stored under names with this ending: each part, with the index along the first dimension where it
    begins; Megatron stacks the layers of a stack of equal ones there.

    Raises:
        UnreadableError, OSError: as `stored`.
    """
    found: dict[str, list[tuple[int, tuple[str, int, int]]]] = {}
    for index, part in _places(folder):
        if index.get("fqn", "").endswith(ending):
            found.setdefault(index["fqn"], []).append(((index.get("offset") or (0,))[0], part))
    return found


def _places(folder: Path) -> Iterator[tuple[dict[str, Any], tuple[str, int, int]]]:
    """What each part is, and its file, offset and length."""
    with (folder / ".metadata").open("rb") as file:
        metadata = _unpickled(file, ".metadata")
    data = getattr(metadata, "storage_data", None)
    if not isinstance(data, dict):
        raise UnreadableError("`.metadata` does not say which files there are")
    for index, place in data.items():
        said = vars(place)
        with contextlib.suppress(KeyError):  # of a torch that says it otherwise: nothing is known of this part
            yield dict(vars(index)), (said["relative_path"], said["offset"], said["length"])


def saved_arguments(folder: Path) -> dict[str, Any]:
    """Megatron's arguments when it wrote a checkpoint, by name: those that are numbers, texts, lists of them or None.

    Empty where they stand in none of the places that are known.

    Raises:
        UnreadableError: the file they stand in is broken; never of a checkpoint that is complete.
        OSError: it cannot be read.
    """
    common = common_state(folder)
    if isinstance(common, list) and len(common) == 1:  # one part of the one object that is stored
        common = common[0]
    arguments = common.get("args") if isinstance(common, dict) else common
    if not isinstance(arguments, argparse.Namespace):
        return {}
    return {name: value for name, value in vars(arguments).items() if _is_plain(value)}


def common_state(folder: Path, parts: Parts | None = None) -> Any:
    """The part of a checkpoint that every rank has alike, or its arguments alone; None where there is neither.

    `parts` are what `stored` says, where that is known.

    Raises:
        UnreadableError, OSError: as `saved_arguments`.
    """
    ranks = sorted(folder.glob("mp_rank_*/model_optim_rng.pt"))
    for path in [folder / "common.pt", *ranks[:1]]:
        if path.exists():
            with path.open("rb") as file:
                return unzipped(file, path.name)
    for name, of_one in (stored(folder) if parts is None else parts).items():
        if name.startswith(_COMMON) or name == "args":
            place, offset, length = of_one[0]
            with (folder / place).open("rb") as file:
                file.seek(offset)
                return unzipped(io.BytesIO(file.read(length)), place)
    return None


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))


def differences(saved: dict[str, Any], argv: list[str]) -> list[str]:
    """What of the schedule, the batch and the layout a run's arguments say unlike its checkpoint's; a sentence each.

    Only what `argv` says is compared; the schedule not at all where it says whose schedule wins.
    """
    said = _options(argv)
    chosen = any(option in argv for option in _OWN_CHOICE)
    names = (*(() if chosen else _SCHEDULE), *_BATCH, *_LAYOUT)
    pairs = [(name, said[name]) for name in names if name in said and name in saved]
    found = [
        f"the checkpoint has {name} {_shown(saved[name])}, the run {' '.join(words)}"
        for name, words in pairs
        if not _same(saved[name], words)
    ]
    return [*found, *(() if chosen else _moved_end(saved, said))]


def _moved_end(saved: dict[str, Any], said: dict[str, list[str]]) -> Iterator[str]:
    """Where nothing says how long the decay is, it is as long as the training."""
    for decay, length in (("lr_decay_iters", "train_iters"), ("lr_decay_samples", "train_samples")):
        if decay not in said and length in said and saved.get(decay) and not _same(saved[decay], said[length]):
            run = " ".join(said[length])
            yield f"the checkpoint has {decay} {saved[decay]}, the run decays to its end, {length} {run}"


def _options(argv: list[str]) -> dict[str, list[str]]:
    """The words behind each option, by the name of its argument; the last time it is said counts."""
    said: dict[str, list[str]] = {}
    words: list[str] = []
    for word in argv:
        if word.startswith("--"):
            option, equals, value = word.partition("=")
            words = [value] if equals else []
            said[option[2:].replace("-", "_")] = words
        else:
            words.append(word)
    return said


def _same(value: Any, words: list[str]) -> bool:
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    return len(values) == len(words) and all(map(_same_word, values, words))


def _same_word(value: Any, word: str) -> bool:
    if isinstance(value, (int, float)) and _NUMBER.fullmatch(word):
        return float(word) == float(value)
    return str(value) == word


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
