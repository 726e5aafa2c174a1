"""What an image has and can do, asked inside it: `python look_inside.py gpus`, or `network` on each of several nodes.

Prints one line, `moekit-image: {...}`. Standard library, torch and Transformer Engine; Python >= 3.10.

gpus      versions of torch and Transformer Engine, the devices, and a sum that each of them computes
network   one rank a node, started by srun: a sum over all ranks by NCCL, on the first device of each
"""

from __future__ import annotations

import json
import os
import re
import sys
from typing import Any

PORT = 29513
_ENOUGH_S = 300


def gpus() -> dict[str, Any]:
    """Versions, and what each device makes of a sum whose value is known."""
    import torch

    try:
        import transformer_engine

        engine = str(transformer_engine.__version__)
    except ImportError as missing:
        engine = f"not there: {missing}"
    devices = []
    for number in range(torch.cuda.device_count()):
        found = torch.arange(1000, device=f"cuda:{number}", dtype=torch.float32).sum().item()
        devices.append({"name": torch.cuda.get_device_name(number), "sum": found, "right": found == 499500.0})
    return {"torch": str(torch.__version__), "transformer_engine": engine, "devices": devices}


def network() -> dict[str, Any]:
    """The sum of ones over all ranks; which network NCCL takes, it prints itself (`NCCL_DEBUG=INFO`)."""
    from datetime import timedelta

    import torch

    rank, world = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ["SLURM_JOB_NODELIST"]
    where = f"tcp://{first_of(nodes)}:{PORT}"
    waits = timedelta(seconds=_ENOUGH_S)
    torch.distributed.init_process_group("nccl", init_method=where, rank=rank, world_size=world, timeout=waits)
    one = torch.ones(1 << 20, device="cuda:0")
    torch.distributed.all_reduce(one)
    total = one[0].item()
    torch.distributed.destroy_process_group()
    return {"rank": rank, "sum": total, "right": total == world}


def first_of(nodes: str) -> str:
    """The first node of a Slurm list such as `gpu[03-04,7],login`; inside a container there is no scontrol."""
    first = re.match(r"[^,\[]*(\[[^\]]*\])?[^,\[]*", nodes)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0] if first else nodes)


if __name__ == "__main__":
    print("moekit-image: " + json.dumps(gpus() if sys.argv[1] == "gpus" else network()), flush=True)
