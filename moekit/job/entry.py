"""What torchrun starts on every rank: `python -m torch.distributed.run ... job/entry.py <Megatron's arguments>`.

It installs what this process needs, before Megatron is imported, and runs the script of a checkout, `pretrain_gpt.py`
or `pretrain_hybrid.py`, or `gpt.py` on the wheel. The working directory is the run directory. From the environment:

MOEKIT_ATTEMPT    the number of this (re)start; arguments that begin with `attempts/N/` get it in the place of N
MOEKIT_DEVICE     `cpu` or `gpu`
MOEKIT_MEGATRON   a Megatron-LM checkout; unset: the installed megatron-core
MOEKIT_STACK      `hybrid` for `pretrain_hybrid.py`, which trains hybrid stacks; unset: `pretrain_gpt.py`
MOEKIT_ROUTING_TRACE_LAST_ITERS   trace the routing of this many last iterations too; unset: none
MOEKIT_DIAGNOSE_INTERVAL   every so many iterations, look at router and experts (`diagnose.py`); unset: never
MOEKIT_HASH_TABLE   the token-to-expert table that hash layers begin with; unset: Megatron's placeholder
MOEKIT_KEEP_LAST, MOEKIT_KEEP_EVERY   checkpoints that stay: the newest so many, and the multiples; unset: all

It writes, in `attempts/<number>/`, `installed.json` and `software.json` (rank 0), `metrics.jsonl` (the last rank),
`exit/rank<r>.json` (each).
Importing this file does nothing: the processes that write checkpoints import it again.
"""

from __future__ import annotations

import os
import runpy
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path


def main() -> None:
    """Run this rank to its end, and record that end."""
    import exits  # type: ignore[import-not-found]

    attempt, rank = int(os.environ["MOEKIT_ATTEMPT"]), int(os.environ.get("RANK", "0"))
    folder = Path("attempts", str(attempt)).absolute()
    sys.argv[1:] = [with_attempt(argument, attempt) for argument in sys.argv[1:]]
    with keeping_checkpoints(rank):
        exits.run_recorded(lambda: train(folder, rank), folder / "exit" / f"rank{rank}.json")


def with_attempt(argument: str, attempt: int) -> str:
    """`argument`, with a leading `attempts/N/` made that of the real attempt."""
    prefix = "attempts/N/"
    return f"attempts/{attempt}/{argument[len(prefix) :]}" if argument.startswith(prefix) else argument


def keeping_checkpoints(rank: int) -> AbstractContextManager[None]:
    """On rank 0, where a run keeps only some of its checkpoints: delete the others while it trains, and at its end."""
    import pruning  # type: ignore[import-not-found]

    last, every = (int(os.environ.get(f"MOEKIT_KEEP_{name}") or 0) for name in ("LAST", "EVERY"))
    return pruning.pruned(Path("checkpoints").absolute(), last, every or None) if last and rank == 0 else nullcontext()


def train(folder: Path, rank: int) -> None:
    """Install what is needed, say so once, and hand over to Megatron's trainer."""
    import exits
    import gpt  # type: ignore[import-not-found]
    import software  # type: ignore[import-not-found]
    import wandb_face  # type: ignore[import-not-found]

    face = wandb_face.install(folder / "metrics.jsonl")
    exits.record_sigterm(folder / "exit" / f"rank{rank}.json", after=face.flush_unless_busy)
    checkout = os.environ.get("MOEKIT_MEGATRON")
    installed = [*install(checkout), wandb_face.INSTALLED]
    if rank == 0:
        exits.write_json(folder / "installed.json", installed)
        exits.write_json(folder / "software.json", software.software())
        for part in installed:
            print(f"moekit: in this process: {part['name']} ({part['why']})", flush=True)
    if checkout is None:
        gpt.main()
    else:
        sys.argv[0] = str(Path(checkout, f"pretrain_{os.environ.get('MOEKIT_STACK', 'gpt')}.py"))
        runpy.run_path(sys.argv[0], run_name="__main__")


def install(checkout: str | None) -> list[dict[str, str]]:
    """Everything but the face of wandb, which must be there first; the list of what was put in."""
    import cuda_on_cpu  # type: ignore[import-not-found]
    import diagnose  # type: ignore[import-not-found]
    import fixes  # type: ignore[import-not-found]
    import hash_table  # type: ignore[import-not-found]
    import hooks  # type: ignore[import-not-found]
    import local_hybrid  # type: ignore[import-not-found]
    import torch
    import upcycling  # type: ignore[import-not-found]

    installed = []
    on_cpu = os.environ.get("MOEKIT_DEVICE") == "cpu" and not torch.cuda.is_available()
    if on_cpu:
        cuda_on_cpu.install()
        installed.append(cuda_on_cpu.INSTALLED)
    if checkout is not None:
        sys.path.insert(0, checkout)  # after our own imports: the checkout's modules may have the names of ours
    if on_cpu and local_hybrid.is_asked_for(sys.argv):
        local_hybrid.install()
        installed.append(local_hybrid.INSTALLED)
    last_iters = int(os.environ.get("MOEKIT_ROUTING_TRACE_LAST_ITERS") or 0)
    installed += [*fixes.install(), *upcycling.install(), *hash_table.install(), *hooks.install(last_iters)]
    return [*installed, *diagnose.install(int(os.environ.get("MOEKIT_DIAGNOSE_INTERVAL") or 0))]


if __name__ == "__main__":
    main()
