"""What goes wrong inside a training process. A run gets this file as `job/sitecustomize.py`, which every Python there
imports when it starts; a rank then asks, at each of its points, the file `fault/plan.json` whether now is the time:

    [{"point": "step", "rank": 1, "do": "hold"}]

Points of a rank, in the order in which it comes by:

    begin        nothing is imported yet
    load         the model is made; the checkpoint, if there is one, is not read
    first        all is ready, and no step done
    step         in a step: between its forward and its backward
    shards       in a save: this rank's shard is not written, the others' may be
    metadata     in a save: all shards are written, and `.metadata` is not (rank 0)
    tracker      in a save: the checkpoint is complete, and the tracker names the one before (rank 0)
    validation   in an evaluation
    end          the last step is done, and its checkpoint complete

What it does there:

    hold             wait for `fault/go`, or the end of the plan; as ever, `fault/reached` says that it is there
    nan              make the loss NaN (step only)
    exit N           `sys.exit(N)`
    vanish N         end with code N, and without any word
    signal N         send itself signal N
    memory           raise torch.OutOfMemoryError
    raise TEXT       raise a RuntimeError
    name HOST        from now on be on a machine of this name

Besides, a plan may say `"iteration"` (the first at which it holds), `"node"` (the host name) and `"attempt"`. With
`"keep": true` it is done each time, else once: the rank that does it makes a file `fault/done.<its place>`. The file
holds a list of plans.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PLAN, REACHED, GO = Path("fault/plan.json"), Path("fault/reached"), Path("fault/go")
POINTS = ("begin", "load", "first", "step", "shards", "metadata", "tracker", "validation", "end")
state = {"iteration": 0}


def plans(point: str) -> Iterator[dict[str, Any]]:
    """The plans that are for this rank, here and now."""
    said = []
    with contextlib.suppress(OSError, ValueError):
        said = json.loads(PLAN.read_text())
    here = {
        "point": point,
        "rank": int(os.environ["RANK"]),
        "attempt": int(os.environ["MOEKIT_ATTEMPT"]),
        "node": os.uname()[1],
    }
    for place, one in enumerate(said):
        now = all(one.get(name, value) == value for name, value in here.items())
        if not now or state["iteration"] < one.get("iteration", 0):
            continue
        if not one.get("keep"):
            with contextlib.suppress(FileExistsError):
                Path(f"fault/done.{place}").touch(exist_ok=False)
                yield one
        else:
            yield one


def at(point: str) -> bool:
    """Do what the plans say of this point; whether the loss is to be NaN."""
    return any(do(*one["do"].partition(" ")[::2], point) for one in plans(point))


def do(what: str, how: str, point: str) -> bool:
    """Do one thing; whether the loss is to be NaN."""
    REACHED.write_text(f"{point} {state['iteration']}\n")
    if what == "hold":
        ends = time.monotonic() + 900
        while PLAN.exists() and not GO.exists() and time.monotonic() < ends:
            time.sleep(0.02)
    elif what == "exit":
        sys.exit(int(how))
    elif what == "vanish":
        os._exit(int(how))
    elif what == "signal":
        os.kill(os.getpid(), int(how))
        time.sleep(60)
    elif what == "memory":
        import torch

        raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate 20.00 GiB. {how}")
    elif what == "raise":
        raise RuntimeError(how)
    elif what == "name":
        names = list(os.uname())
        names[1] = how
        os.uname = lambda: os.uname_result(names)  # type: ignore[assignment]
    return what == "nan"


def into_training(training: Any) -> None:
    """Megatron's `training.training` comes by `load`, `first`, `step`, `validation` and `end`."""
    load, train, train_step = training.load_checkpoint, training.train, training.train_step
    evaluate = training.evaluate

    @functools.wraps(load)
    def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
        at("load")
        return load(*args, **kwargs)

    @functools.wraps(train)
    def train_all(*args: Any, **kwargs: Any) -> Any:
        at("first")
        done = train(*args, **kwargs)
        at("end")
        return done

    @functools.wraps(train_step)
    def one_step(forward: Any, *args: Any, **kwargs: Any) -> Any:
        state["iteration"] = int(kwargs.get("iteration") or 0) + 1

        @functools.wraps(forward)
        def one_forward(*args: Any, **kwargs: Any) -> Any:
            output, loss = forward(*args, **kwargs)
            return (output * float("nan") if at("step") else output), loss

        return train_step(one_forward, *args, **kwargs)

    @functools.wraps(evaluate)
    def validate(*args: Any, **kwargs: Any) -> Any:
        at("validation")
        return evaluate(*args, **kwargs)

    training.load_checkpoint, training.train, training.train_step = load_checkpoint, train_all, one_step
    training.evaluate = validate


def into_writer(writer: Any) -> None:
    """The writer of distributed checkpoints comes by `shards` and `metadata`."""
    kind = writer.FileSystemWriterAsync
    prepare, finish = kind.prepare_write_data, kind.finish

    def prepare_write_data(self: Any, *args: Any) -> Any:
        at("shards")
        return prepare(self, *args)

    def finish_all(self: Any, *args: Any) -> Any:
        at("metadata")
        return finish(self, *args)

    kind.prepare_write_data, kind.finish = prepare_write_data, finish_all


def into_checkpointing(checkpointing: Any) -> None:
    """The writer of the tracker comes by `tracker`."""
    name = checkpointing.get_checkpoint_tracker_filename

    def tracker(*args: Any) -> Any:
        if sys._getframe(1).f_code.co_name == "save_checkpoint":
            at("tracker")
        return name(*args)

    checkpointing.get_checkpoint_tracker_filename = tracker


AFTER = {
    "megatron.training.training": into_training,
    "megatron.training.checkpointing": into_checkpointing,
    "megatron.core.dist_checkpointing.strategies.filesystem_async": into_writer,
}


class AfterImport:
    """A finder in front of all others that finds nothing itself, and changes a module of AFTER once it is loaded."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        change = AFTER.get(name)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target) if change else None
        if spec is None or change is None:
            return None
        load = spec.loader.exec_module  # type: ignore[union-attr]

        def exec_module(module: Any) -> None:
            load(module)
            change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign, union-attr]
        return spec


if "RANK" in os.environ and any(word.endswith("job/entry.py") for word in sys.orig_argv):
    sys.meta_path.insert(0, AfterImport())  # type: ignore[arg-type]
    at("begin")
