"""What trains in this process, `attempts/N/software.json`: a result holds for the versions and device it came from."""

from __future__ import annotations

import importlib.metadata
import os
import re
from pathlib import Path
from typing import Any


def software() -> dict[str, Any]:
    """Versions of Megatron, torch and Transformer Engine (None where there is none), and the device's name."""
    import torch
    from megatron.core import package_info

    # Megatron adds the commit of whatever git checkout lies around it, which may be another project's.
    version, _, commit = package_info.__version__.partition("+")
    of_its_own = Path(package_info.__file__).parents[2].joinpath(".git").exists()
    try:
        transformer_engine = importlib.metadata.version("transformer_engine")
    except importlib.metadata.PackageNotFoundError:
        transformer_engine = None
    return {
        "megatron": f"{version}+{commit}" if commit and of_its_own else version,
        "torch": torch.__version__,
        "transformer_engine": transformer_engine,
        "device": "cpu" if os.environ.get("MOEKIT_DEVICE") == "cpu" else gpu_name(),
    }


def gpu_name(driver: Path = Path("/proc/driver/nvidia/gpus")) -> str:
    """The name of the first GPU, as its driver says it, `NVIDIA H100 80GB HBM3`; asking CUDA would start it here."""
    for path in sorted(driver.glob("*/information")):
        if model := re.search(r"^Model:\s*(.+)$", path.read_text(), re.MULTILINE):
            return model[1].strip()
    return "gpu"
