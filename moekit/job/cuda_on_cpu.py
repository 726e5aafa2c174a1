"""Megatron on a machine without a GPU: what it asks of CUDA, answered for a CPU.

Megatron-Core takes a GPU for granted; on a CPU its own Python and torch's own kernels do the same work once these
questions have an answer. Devices, streams and queries are replaced, and no arithmetic: every matmul, softmax,
permutation, collective and optimizer step stays Megatron's and torch's own.

| asked                                                  | answered                                                    |
|--------------------------------------------------------|-------------------------------------------------------------|
| `torch.empty(..., device="cuda")`, `.to(0)`, `.cuda()` | the tensor is made on `device` ("cpu", or "meta" to count)  |
| `Tensor.is_cuda`, `Tensor.type()`, by Megatron only    | yes, and `torch.cuda.FloatTensor`: its optimizers compare   |
|                                                        | the name, its dispatcher makes split sizes lists only then  |
| `torch.cuda.is_available()`, by Megatron only          | yes; torch itself must know the truth                       |
| device count, name, capability, memory                 | one device of `capability`; nothing allocated               |
| streams, events, synchronize, NVTX ranges              | done already: a CPU works in order                          |
| `torch.cuda` random state                              | the CPU generator                                           |
| `torch.compile`                                        | the function itself: same code, run eagerly                 |

Where Megatron asks (0.19.2): some 45 places in the core (router.py:98, layers.py:302, optimizer.py:315,
token_dispatcher.py:922 ...), some 95 with the trainer and a checkpoint save.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import time
import types
from collections import defaultdict
from typing import Any, Callable

INSTALLED = {
    "name": "cuda_on_cpu",
    "why": "no GPU is visible: devices, streams and queries are answered for the CPU, no arithmetic is replaced",
    "source": "megatron/training/initialize.py: Megatron requires CUDA",
}

_target: Any = None  # the device of tensors that are asked for on CUDA
_MEGATRON = ("megatron", "gpt_builders", "model_provider")  # top-level modules that are Megatron's
# Functions of torch that take `device=`, and methods of Tensor that do.
_FACTORIES = [
    *("empty", "empty_strided", "zeros", "ones", "full", "eye", "arange", "linspace", "tensor", "as_tensor"),
    *("rand", "randn", "randint", "randperm"),
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
]
_METHODS = ["new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full", "new_tensor"]
# Functions of torch.cuda that do nothing here, and those that answer 0.
_NOTHING = [
    *("init", "set_device", "set_stream", "synchronize", "empty_cache", "ipc_collect", "manual_seed_all"),
    *("reset_peak_memory_stats", "reset_max_memory_allocated"),
]
_ZERO = [
    *("current_device", "utilization", "device_memory_used"),
    *("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"),
]


class Stream:
    """A stream of a device that works in order: everything before is done."""

    device_index = cuda_stream = stream_id = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None:
        """Nothing to wait for."""

    def wait_event(self, event: Any) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """All work is done."""
        return True

    def record_event(self, event: Event | None = None) -> Event:
        """An event that has happened."""
        event = event or Event()
        event.record(self)
        return event

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None: ...

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)  # a CPU has one

    def __hash__(self) -> int:
        return 0


class Event:
    """The moment it was recorded."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.seconds = 0.0

    def record(self, stream: Any = None) -> None:
        """Now."""
        self.seconds = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """It has happened."""
        return True

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds from this event to `end`."""
        return (end.seconds - self.seconds) * 1e3


def install(device: str = "cpu", capability: tuple[int, int] = (9, 0)) -> None:
    """Answer for CUDA from here on, in this process; call it before Megatron is imported, and once.

    `device`: where tensors asked for on CUDA are made, "cpu" or "meta" (shapes without memory).
    `capability`: the compute capability that Megatron is told, (9, 0) being Hopper's.
    """
    import torch

    put_tensors_on(device)
    _move_tensors(torch)
    _answer_queries(torch, capability)
    torch.compile = _not_compiled
    if device == "cpu":
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks_here))
        # The generator of "the GPU" is the CPU's here, so Megatron warns at every fork of it.
        logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)


def put_tensors_on(device: str) -> None:
    """From here on, tensors asked for on CUDA are made on `device`."""
    import torch

    global _target
    _target = torch.device(device)


def _names_cuda(device: Any) -> bool:
    """Whether this `device` argument means a GPU; a bare integer is a GPU's index."""
    if isinstance(device, str):
        return device.startswith("cuda")
    if isinstance(device, int):
        return not isinstance(device, bool)
    return getattr(device, "type", None) == "cuda"  # of a tensor, `type` is a method


def _megatron_asks() -> bool:
    """Whether the caller of the function that calls this is code of Megatron."""
    name = sys._getframe(2).f_globals.get("__name__") or ""
    return name.partition(".")[0] in _MEGATRON


def _move_tensors(torch: Any) -> None:
    """Make tensors on `_target` wherever a GPU is named, and let them look like a GPU's to Megatron."""
    from torch.utils._device import _device_constructors

    _device_constructors()  # fills torch's cache: `with torch.device(...)` must go on knowing the functions below

    def redirected(make: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(make)
        def make_on_target(*args: Any, **kwargs: Any) -> Any:
            if _names_cuda(kwargs.get("device")):
                kwargs["device"] = _target
            return make(*args, **kwargs)

        return make_on_target

    tensor = torch.Tensor
    for owner, names in ((torch, _FACTORIES), (tensor, _METHODS)):
        for name in names:
            setattr(owner, name, redirected(getattr(owner, name)))

    move, name_of_type, is_cuda = tensor.to, tensor.type, tensor.is_cuda

    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args and _names_cuda(args[0]):
            args = (_target, *args[1:])
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = _target
        return move(self, *args, **kwargs)

    def type_(self: Any, *args: Any, **kwargs: Any) -> Any:
        answer = name_of_type(self, *args, **kwargs)
        if not args and not kwargs and _megatron_asks():
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer

    def looks_cuda(self: Any) -> bool:
        return _megatron_asks() or bool(is_cuda.__get__(self))

    tensor.to, tensor.type, tensor.is_cuda = to, type_, property(looks_cuda)
    tensor.cuda = lambda self, *_, **__: self if self.device.type == _target.type else move(self, _target)
    tensor.pin_memory = lambda self, *_, **__: self
    tensor.record_stream = lambda self, stream: None


def _answer_queries(torch: Any, capability: tuple[int, int]) -> None:
    """Put an answer in the place of each question Megatron asks of `torch.cuda`."""
    cuda, generator, stream = torch.cuda, torch.default_generator, Stream()
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    major, minor = capability
    properties = types.SimpleNamespace(
        name="CPU", major=major, minor=minor, total_memory=memory_bytes, multi_processor_count=1
    )
    answers: dict[str, Callable[..., Any]] = {
        **{name: lambda *_, **__: None for name in _NOTHING},
        **{name: lambda *_, **__: 0 for name in _ZERO},
        "is_available": _megatron_asks_for_gpu,
        "device_count": lambda: 1,
        "get_device_name": lambda *_: "CPU",
        "get_device_capability": lambda *_: capability,
        "get_device_properties": lambda *_: properties,
        "mem_get_info": lambda *_: (memory_bytes, memory_bytes),
        "memory_stats": lambda *_: defaultdict(int),
        "current_stream": lambda *_: stream,
        "default_stream": lambda *_: stream,
        "stream": lambda s=None: contextlib.nullcontext(s),
        "is_current_stream_capturing": lambda: False,
        "get_rng_state": lambda *_, **__: generator.get_state(),
        "set_rng_state": lambda state, *_, **__: generator.set_state(state),
        "manual_seed": lambda seed: generator.manual_seed(int(seed)),
        "_lazy_init": lambda: None,
        "_lazy_call": lambda call, **_: call(),
    }
    for name, answer in answers.items():
        setattr(cuda, name, answer)
        if hasattr(cuda.random, name):
            setattr(cuda.random, name, answer)
    cuda.default_generators = (generator,)
    cuda.Stream, cuda.Event = Stream, Event
    cuda.nvtx = types.SimpleNamespace(
        range_push=lambda *_: None,
        range_pop=lambda: None,
        mark=lambda *_: None,
        range=lambda *_, **__: contextlib.nullcontext(),
    )


def _megatron_asks_for_gpu() -> bool:
    """`torch.cuda.is_available()`: yes to Megatron, the truth to everyone else."""
    return _megatron_asks()


def _not_compiled(model: Any = None, *_: Any, **__: Any) -> Any:
    """`torch.compile` that leaves the function as it is, also as `@torch.compile(...)`."""
    return model if model is not None else lambda function: function
