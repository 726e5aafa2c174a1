"""The module that Megatron finds as `wandb`: it takes Megatron's calls and appends JSON lines, and nothing else.

Megatron logs one scalar a call; a step is one line, `{"step": 10, "time": 1764.0, "metrics": {"lm loss": 8.3, ...}}`,
or two where more than `QUIET_SECONDS` pass between its scalars (an evaluation): a reader merges by step. Besides them
`{"event": "config", "config": {...}}`, each adding to the ones before, and `{"event": "finish"}`. NaN and infinities
are the texts "NaN", "Infinity" and "-Infinity". Whatever reads the lines runs outside the training process.

What Megatron needs of it (0.19.2): `megatron.core.timers` imports wandb on every rank and compares `writer == wandb`,
so it must stand in `sys.modules` before Megatron is imported; `wandb.init(dir, name, project, config, entity)` comes
on the last rank only (training/global_vars.py: _set_wandb_writer), with all of Megatron's arguments as config;
artifacts come with every checkpoint, outside any `try` (training/wandb_utils.py). Nothing here raises: a failure is
warned of once. Nothing waits for a disk but `init`, `flush` and `finish`, and those no longer than `WAIT_SECONDS`.

TensorBoard's writer of that rank gets what wandb gets, a moment before, and more (`mem-*`, `lm loss validation ppl`).
All of it is taken there; a call to wandb adds what only wandb gets. So a tensor is read off its GPU once, not twice.
"""

from __future__ import annotations

import atexit
import enum
import functools
import importlib.machinery
import json
import math
import sys
import threading
import time
import types
from contextlib import suppress
from pathlib import Path
from typing import Any, Callable

try:  # a file of the package, and of a run's job/, where the files stand alone
    from .lines import Lines
except ImportError:
    from lines import Lines  # type: ignore[import-not-found, no-redef]

QUIET_SECONDS = 5.0  # a step that has been quiet for so long is written
WAIT_SECONDS = 5.0  # a checkpoint and an end wait so long for a file system that hangs
VS_SAMPLES = " vs samples"  # Megatron tells TensorBoard many values twice, again with samples for steps

INSTALLED = {
    "name": "wandb_face",
    "why": "Megatron's metrics become lines of attempts/N/metrics.jsonl; Weights & Biases is not used",
    "source": "megatron/training/global_vars.py: _set_wandb_writer",
}


def install(path: Path) -> WandbFace:
    """Become `wandb` in this process, writing to `path` once Megatron calls `init`."""
    face = WandbFace(path)
    sys.modules["wandb"] = face
    return face


def plain(value: Any) -> Any:
    """`value` as JSON can hold it: enums, functions and types by their names, anything else by its text.

    An object that has no text of its own, only an address, is named by its type: the same run has the same config.
    """
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return json_float(value)
    if isinstance(value, (set, frozenset)):
        return sorted((plain(item) for item in value), key=str)
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if callable(value):
        return getattr(value, "__qualname__", type(value).__name__)
    return type(value).__name__ if " at 0x" in (text := str(value)) else text


def json_float(value: float) -> float | str:
    """`value`, or its JavaScript name where JSON has no number for it."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def number(value: Any) -> Any:
    """The number in `value` (a tensor or NumPy value of one element holds one), or None; a GPU's is waited for."""
    if isinstance(value, (bool, int, float)):
        return value
    count = value.numel() if hasattr(value, "numel") else getattr(value, "size", 0)
    taken = value.item() if count == 1 else None
    return taken if isinstance(taken, (bool, int, float)) else None


def guarded(method: Callable[..., Any]) -> Callable[..., Any]:
    """`method`, with its failure warned of (once a process) instead of raised into the training."""

    @functools.wraps(method)
    def call(self: WandbFace, *args: Any, **kwargs: Any) -> Any:
        try:
            with self._lock:
                return method(self, *args, **kwargs)
        except Exception as failure:
            self.warn(f"`{method.__name__}` fails: {type(failure).__name__}: {failure}")
            return None

    return call


class Artifact:
    """A checkpoint that Megatron announces; the run directory has it already."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def add_reference(self, *_: Any, **__: Any) -> None:
        """Nothing to add."""

    add_file = add_dir = add_reference


class Run:
    """`wandb.run`: the names Megatron writes into `latest_wandb_artifact_path.txt`, and artifacts that go nowhere."""

    entity = "local"

    def __init__(self, project: str = "", name: str = "") -> None:
        self.project, self.name = project, name

    def log_artifact(self, *_: Any, **__: Any) -> None:
        """Nothing to log."""

    use_artifact = log_artifact


class Config:
    """`wandb.config`: what Megatron adds to its arguments after `init`."""

    def __init__(self, write: Callable[[Any], None]) -> None:
        self._write = write

    def update(self, values: Any, **_: Any) -> None:
        """Write `values` as a further config line."""
        self._write(values)


class WandbFace(types.ModuleType):
    """The module itself; `path` is opened by `init`."""

    Artifact = Artifact

    def __init__(self, path: Path) -> None:
        super().__init__("wandb", __doc__)
        self.__version__ = "0"
        self.__spec__ = importlib.machinery.ModuleSpec("wandb", None)  # others ask `find_spec("wandb")`
        self.run: Run | None = None
        self.config = Config(self._write_config)
        self._path = path
        self._lines: Lines | None = None
        self._lock = threading.RLock()
        self._warned = False
        self._step: int | None = None
        self._values: dict[str, Any] = {}  # of the step, not yet written
        self._names: set[str] = set()  # of the step, written or not
        self._first_time = self._last_call = 0.0

    def init(self, project: str = "", name: str = "", config: Any = None, **_: Any) -> Run:
        """Open the file and write the config; `dir`, `entity` and everything else are ignored."""
        self.run = Run(project or "", name or "")
        self._open()
        self._write_config(config or {})
        self.flush()
        return self.run

    @guarded
    def log(self, data: dict[str, Any], step: Any = None, **_: Any) -> None:
        """Take the scalars of `data` for `step`; what is no number is left out."""
        self._begin(step)
        for name, value in data.items():
            self._take(name, value)

    def _begin(self, step: Any) -> None:
        """Let `step` be the one that is collected; None: the one that is."""
        step = self._step if step is None else int(step)
        if step != self._step:
            self._hand_over()
            self._step, self._names = step, set()
        if not self._values:
            self._first_time = time.time()
        self._last_call = time.monotonic()

    def _take(self, name: str, value: Any) -> Any:
        """Take a value, unless the step has one of that name; the number that it is, if it was taken.

        The first value of a name stays: Megatron's closing evaluation of the test set uses the validation's name.
        """
        taken = None if name in self._names else number(value)
        if taken is not None:
            self._values[name] = taken
            self._names.add(name)
        return taken

    def _hand_over(self) -> None:
        values, self._values = self._values, {}
        if values and self._step is not None:
            metrics = {name: json_float(value) for name, value in values.items()}
            self._write({"step": self._step, "time": self._first_time, "metrics": metrics})

    @guarded
    def flush(self) -> None:
        """Write the step that is being collected, and all before it."""
        self._hand_over()
        if self._lines is not None and not self._lines.wait(WAIT_SECONDS):
            self.warn(f"`{self._path}` was not written within {WAIT_SECONDS:g} s")

    def flush_unless_busy(self, wait_s: float = 1.0) -> None:
        """`flush`, unless the training is inside a call for `wait_s` seconds: reading a value may wait for the GPU."""
        if self._lock.acquire(timeout=wait_s):
            self.flush()
            self._lock.release()

    @guarded
    def finish(self, *_: Any, **__: Any) -> None:
        """Write what is left and say that the run came to its end; nothing is written after it."""
        if self._lines is not None:
            self._hand_over()
            self._write({"event": "finish", "time": time.time()})
            self.flush()
            self._lines = None

    def warn(self, text: str) -> None:
        """Say that metrics are missing, the first time."""
        if not self._warned:
            self._warned = True
            with suppress(Exception):  # nobody reads it any more
                print(f"moekit: metrics are no longer complete: {text}", file=sys.stderr, flush=True)

    @guarded
    def _open(self) -> None:
        if self._lines is None:
            self._lines = Lines(self._path, self._hand_over_if_quiet, self.warn)
            atexit.register(self.flush)
            self._take_what_tensorboard_gets()

    @guarded
    def _write_config(self, config: Any) -> None:
        # Trackio reserves keys that start with `_`; Megatron has such arguments.
        values = {str(key).lstrip("_"): plain(value) for key, value in dict(config).items()}
        self._write({"event": "config", "config": values, "time": time.time()})

    def _write(self, line: dict[str, Any]) -> None:
        if self._lines is not None:
            self._lines.add(json.dumps(line, allow_nan=False))

    def _hand_over_if_quiet(self) -> None:
        if self._lock.acquire(blocking=False):  # else the training is inside a call
            try:
                if time.monotonic() - self._last_call >= QUIET_SECONDS:
                    self._hand_over()
            finally:
                self._lock.release()

    @guarded
    def _take_scalar(self, tag: str, value: Any, step: Any) -> Any:
        """Take a scalar on its way to TensorBoard; the number that it is, if it was taken."""
        if tag.endswith(VS_SAMPLES):
            return None
        self._begin(step)
        return self._take(tag, value)

    def _take_what_tensorboard_gets(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        add_scalar = SummaryWriter.add_scalar

        @functools.wraps(add_scalar)
        def add(writer: Any, tag: str, value: Any, global_step: Any = None, *args: Any, **kwargs: Any) -> Any:
            taken = self._take_scalar(tag, value, global_step)
            return add_scalar(writer, tag, value if taken is None else taken, global_step, *args, **kwargs)

        SummaryWriter.add_scalar = add
