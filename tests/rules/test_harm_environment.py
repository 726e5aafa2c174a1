"""What a variable does that the rules on the environment refuse."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest

from moekit.launch.script import environment_script


def sourced(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A job's shell that reads `environment.sh` and goes on."""
    (folder / "environment.sh").write_text(script)
    command = "set -euo pipefail; source ./environment.sh; echo trains"
    return subprocess.run(["bash", "-c", command], cwd=folder, capture_output=True, text=True, check=False)


def test_a_variable_of_the_shells_breaks_the_job(tmp_path: Path) -> None:
    assert sourced(environment_script({"NCCL_DEBUG": "INFO"}, ()), tmp_path).stdout == "trains\n"
    broken = sourced(environment_script({"UID": "5"}, ()), tmp_path)
    assert broken.returncode != 0
    assert "readonly variable" in broken.stderr


def test_a_secret_that_is_no_name_stops_the_job(tmp_path: Path) -> None:
    broken = sourced(environment_script({}, ("A; touch p",)), tmp_path)
    assert broken.returncode != 0
    assert "bad substitution" in broken.stderr


@pytest.mark.parametrize("plugin", ["/opt/amazon/ofi-nccl/lib/libnccl-net.so", "spcx"])
def test_a_path_is_no_name_of_a_plugin(plugin: str) -> None:
    """NCCL makes `libnccl-net-<plugin>.so` of it; on EFA there is no library of that name."""
    with pytest.raises(OSError, match="cannot open shared object file"):
        ctypes.CDLL(f"libnccl-net-{plugin}.so")
