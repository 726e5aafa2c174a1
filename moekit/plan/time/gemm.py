"""Matrix multiplications, attention and scans by their shapes: how long one takes on one GPU."""

from __future__ import annotations

import numpy as np

from moekit.plan.candidates import Floats
from moekit.plan.run import Facts
from moekit.plan.time.hardware import Hardware

_TILE = 128, 256
"""Rows and columns of a result that one processor makes at a time (cuBLAS' and CUTLASS' usual choice)."""
_FILL = 128
"""Steps of the inner dimension that filling and emptying a tile's pipeline costs."""


def rate(hardware: Hardware, kind: str) -> float:
    """Operations a second of a very large multiplication in `bf16`, `fp8` or `fp4`."""
    gpu, constants = hardware.gpu, hardware.constants
    if kind == "bf16":
        return gpu.bf16 * constants.gemm
    return (gpu.fp8 if kind == "fp8" else gpu.fp4) * constants.gemm_fp8


def kind_of(facts: Facts) -> str:
    """The format that linear layers multiply in."""
    return "fp4" if facts.fp4 else "fp8" if facts.fp8 else "bf16"


def gemm(
    hardware: Hardware,
    kind: str,
    rows: Floats,
    columns: Floats,
    inner: Floats,
    batch: Floats | int = 1,
    written: float = 2.0,
) -> Floats:
    """Seconds of `batch` multiplications of (rows, inner) with (inner, columns) in one launch.

    Processors take whole tiles, so on average the last round is half empty; short inner dimensions do not fill a
    tile's pipeline; a narrow product waits for memory. `written`: bytes of an element of the result.
    """
    width = {"bf16": 2.0, "fp8": 1.0, "fp4": 0.5}[kind]
    high, wide = _TILE
    # rows of one expert end anywhere in a tile: half of one is wasted, where there are several
    padded = np.where(np.asarray(batch) > 1, rows + high / 2, np.maximum(rows, high / 2))
    tiles = batch * padded / high * np.maximum(columns, wide / 2) / wide
    tile = 2 * high * wide * (inner + _FILL) * hardware.gpu.processors / rate(hardware, kind)
    busy = (tiles + hardware.gpu.processors / 2) / hardware.gpu.processors * tile
    moved = batch * (width * (rows * inner + inner * columns) + written * rows * columns)
    return np.maximum(busy, moved / memory(hardware)) * (rows > 0) * (columns > 0)


def linear(
    hardware: Hardware,
    kind: str,
    rows: Floats,
    out: Floats,
    into: Floats,
    batch: Floats | int = 1,
    grad_bytes: int = 2,
) -> Floats:
    """Seconds forward and backward of a layer from `into` to `out` features: `# (2, candidate)`.

    A weight's gradient is added to what its buffer has of earlier micro batches (`grad_bytes` an element).
    """
    forward = gemm(hardware, kind, rows, out, into, batch)
    inputs = gemm(hardware, kind, rows, into, out, batch)
    weights = gemm(hardware, kind, out, into, rows, batch, written=2.0 * grad_bytes)
    return np.stack([forward, inputs + weights])


def memory(hardware: Hardware) -> float:
    """Bytes a second that kernels read and write."""
    return hardware.gpu.memory * hardware.constants.memory


def attention(hardware: Hardware, operations: Floats, tokens: Floats, width: float) -> Floats:
    """Seconds forward and backward of causal attention: `# (2, candidate)`.

    Args:
        hardware: Whose.
        operations: Forward, the causal half; backward has two and a half times as many.
        tokens: Keys that a query may see, which fill the kernel.
        width: Of a head, keys and values on average; narrow ones leave tensor cores waiting for exponentials.
    """
    of = hardware.gpu.attention
    narrow = min(1.0, (width / (width + _SOFTMAX)) / (128 / (128 + _SOFTMAX)))
    forward = of["forward"] * tokens / (tokens + of["forward_half"]) * narrow
    backward = of["backward"] * tokens / (tokens + of["backward_half"]) * narrow
    return np.stack([operations / forward, 2.5 * operations / backward])


_SOFTMAX = 43
"""Columns of a head whose multiplication takes as long as the softmax beside it: assumed."""


def scan(hardware: Hardware, operations: Floats) -> Floats:
    """Seconds forward and backward of a chunked scan: `# (2, candidate)`."""
    forward = operations / (hardware.gpu.bf16 * hardware.constants.scan)
    return np.stack([forward, 2.5 * forward])
