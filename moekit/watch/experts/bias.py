"""The expert bias in a run's checkpoints: how far the balancer has had to push the experts apart, layer by layer.

Megatron keeps it in float32, as `decoder.layers.mlp.router.expert_bias` with the layers stacked, or one name a layer.
No code of a checkpoint's pickles is run, and PyTorch is not needed.
"""

from __future__ import annotations

import io
import re
import zipfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moekit.job import checkpoints, saved

_NAME = re.compile(r"(?:decoder|(mtp))\.layers\.(?:(\d+)\.)?(?:.*\.)?mlp\.router\.expert_bias")
_LONGEST = 1 << 20
"""Bytes of a part: far more than any number of experts takes."""

Biases = dict[int, dict[str, NDArray[np.float32]]]
"""By step and layer, `layer_3` or `mtp_layer_0`: the bias of each expert `# (expert,)`."""


def read(folder: Path, num_experts: int) -> tuple[Biases, list[str]]:
    """The biases of all complete distributed checkpoints in `folder`; and which could not be read, with the reason."""
    found: Biases = {}
    skipped = []
    for step in checkpoints.steps(folder):
        place = checkpoints.folder_of(folder, step)
        try:
            if why := checkpoints.missing(place):
                raise saved.UnreadableError(why)
            if not (place / ".metadata").exists():
                raise saved.UnreadableError("it is no distributed checkpoint")
            if of_step := _of(place, num_experts):
                found[step] = of_step
        except (saved.UnreadableError, OSError) as failure:
            skipped.append(f"checkpoint {step}: {failure}")
    return found, skipped


def spread(bias: NDArray[np.float32]) -> float:
    """The largest less the smallest."""
    return float(bias.max() - bias.min())


def _of(folder: Path, num_experts: int) -> dict[str, NDArray[np.float32]]:
    found = {}
    for name, parts in saved.first_indices(folder, "expert_bias").items():
        match = _NAME.fullmatch(name)
        if match is None:
            continue
        for first, (file, offset, length) in parts:
            values = _values(folder, file, offset, length)
            if len(values) % num_experts:
                raise saved.UnreadableError(f"`{name}` has {len(values)} values for {num_experts} experts")
            for more, bias in enumerate(values.reshape(-1, num_experts)):
                layer = int(match[2]) if match[2] else first + more
                found[f"{'mtp_' if match[1] else ''}layer_{layer}"] = bias
    return dict(sorted(found.items(), key=lambda item: (item[0].startswith("mtp"), int(item[0].rpartition("_")[2]))))


def _values(folder: Path, file: str, offset: int, length: int) -> NDArray[np.float32]:
    """The numbers of one part, an archive of torch's whose only storage is the tensor's."""
    path = folder / file
    if length > _LONGEST or path.parent != folder:
        raise saved.UnreadableError(f"`{file}` is no part of an expert bias")
    with path.open("rb") as data:
        data.seek(offset)
        content = data.read(length)
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            members = [member for member in archive.infolist() if re.fullmatch(r"[^/]+/data/\d+", member.filename)]
            if len(members) != 1 or members[0].file_size > _LONGEST or members[0].file_size % 4:
                raise saved.UnreadableError(f"`{file}` has no tensor of float32")
            return np.frombuffer(archive.read(members[0]), dtype="<f4")
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError):
        raise saved.UnreadableError(f"`{file}` is cut off, or no file of torch's") from None
