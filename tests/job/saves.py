"""Checkpoints of the real Megatron: `python saves.py save FOLDER` saves for ever, `load FOLDER...` says what loads.

As Megatron's trainer does, a step is a checkpoint and then the file that names it; older ones are deleted. A line of
JSON for each folder that is loaded: its step, or what went wrong. Megatron is imported in functions: a save starts a
helper that imports this file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from moekit.job import checkpoints, cuda_on_cpu

TENSORS, ELEMENTS, KEEP_LAST = 8, 1 << 18, 2


def state(step: int) -> dict[str, Any]:
    """A model whose every number is the step."""
    import torch
    from megatron.core.dist_checkpointing import ShardedTensor

    tensors = {f"layer{n}": torch.full((ELEMENTS,), float(step)) for n in range(TENSORS)}
    return {name: ShardedTensor.from_rank_offsets(name, tensor) for name, tensor in tensors.items()}


def save(folder: Path) -> None:
    from megatron.core import dist_checkpointing

    for step in range(1, 10**6):
        place = checkpoints.folder_of(folder, step)
        place.mkdir()
        dist_checkpointing.save({**state(step), "args": {"step": step}}, str(place))
        with (folder / checkpoints.TRACKER).open("w") as file:
            file.write(str(step))
        checkpoints.prune(folder, KEEP_LAST)


def load(folder: Path) -> dict[str, Any]:
    """The step that every number of a checkpoint is."""
    from megatron.core import dist_checkpointing

    try:
        loaded = dist_checkpointing.load(state(0), str(folder))
    except Exception as failure:
        return {"failure": f"{type(failure).__name__}: {failure}"[:300]}
    return {
        "step": loaded["args"]["step"],
        "numbers": sorted({n for i in range(TENSORS) for n in loaded[f"layer{i}"].unique().tolist()}),
    }


def main(what: str, folders: list[Path]) -> None:
    import torch.distributed

    cuda_on_cpu.install()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    if what == "save":
        save(folders[0])
    for folder in folders:
        print(json.dumps(load(folder)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], [Path(word) for word in sys.argv[2:]])
