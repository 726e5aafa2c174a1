"""What a run says of the software that trained it."""

from __future__ import annotations

from pathlib import Path

import pytest

from moekit.job.software import gpu_name, software


def test_the_gpu_s_name_is_its_driver_s(tmp_path: Path) -> None:
    for folder, model in (("0000:b1:00.0", "NVIDIA H200"), ("0000:1b:00.0", "NVIDIA H100 80GB HBM3")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "information").write_text(f"Model: \t\t {model}\nIRQ:   \t\t 18\n")
    assert gpu_name(tmp_path) == "NVIDIA H100 80GB HBM3"


def test_a_driver_that_says_nothing(tmp_path: Path) -> None:
    assert gpu_name(tmp_path / "missing") == "gpu"
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "information").write_text("IRQ: 18\n")
    assert gpu_name(tmp_path) == "gpu"


@pytest.mark.megatron
def test_versions_are_those_that_are_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setenv("MOEKIT_DEVICE", "cpu")
    found = software()
    assert (found["megatron"], found["torch"], found["device"]) == ("0.19.2", torch.__version__, "cpu")
    assert list(found) == ["megatron", "torch", "transformer_engine", "device"]
