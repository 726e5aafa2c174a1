"""What an image is made of: `IMAGE.sqsh.json`, which the scripts write beside it, kept with the baselines it made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MAGIC = b"hsqs"
_SUPERBLOCK = 96


def record_of(image: Path) -> dict[str, Any] | None:
    """What stands beside an image; None where nothing does, or it cannot be read."""
    try:
        said = json.loads(Path(f"{image}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return said if isinstance(said, dict) else None


def is_whole(image: Path) -> bool:
    """Whether a file is a squashfs with as many bytes as its superblock says (squashfs 4.0: `bytes_used` at 40)."""
    try:
        with image.open("rb") as file:
            head = file.read(_SUPERBLOCK)
            size = image.stat().st_size
    except OSError:
        return False
    used = int.from_bytes(head[40:48], "little")
    return len(head) == _SUPERBLOCK and head[:4] == MAGIC and _SUPERBLOCK < used <= size


def sentences(record: dict[str, Any]) -> list[str]:
    """What an image is, a fact a line, as far as its record says."""
    efa, base = record.get("efa") or {}, record.get("base") or {}
    facts = [
        ("from", record.get("from") or base.get("from") or base.get("image")),
        ("EFA", efa.get("efa_installer") and f"installer {efa['efa_installer']}, libfabric {efa.get('libfabric')}"),
        ("plugin", efa.get("aws_ofi_nccl") and f"aws-ofi-nccl {efa['aws_ofi_nccl']} for NCCL {efa.get('nccl')}"),
        ("sha256", record.get("sha256")),
    ]
    return [f"{name:10}  {value}" for name, value in facts if value]
