"""The least that is a complete checkpoint of Megatron's, for stand-ins of the trainer: arguments, and no weights."""

import argparse
import pickle
import zipfile
from pathlib import Path
from typing import Any


def write(folder: Path, **arguments: Any) -> Path:
    """A checkpoint's folder in Megatron's format `torch`, of one rank."""
    rank = folder / "mp_rank_00"
    rank.mkdir(parents=True)
    with zipfile.ZipFile(rank / "model_optim_rng.pt", "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"args": argparse.Namespace(**arguments)}))
    return folder


def save(checkpoints: Path, step: int, **arguments: Any) -> Path:
    """What Megatron leaves when it has saved a step; the folder."""
    folder = write(checkpoints / f"iter_{step:07}", **arguments)
    (checkpoints / "latest_checkpointed_iteration.txt").write_text(str(step))
    return folder
