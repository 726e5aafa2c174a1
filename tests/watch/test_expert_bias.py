"""The expert bias of checkpoints: against what torch wrote, and of checkpoints that are damaged or made to harm."""

from __future__ import annotations

import os
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moekit.watch.experts import bias

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed.checkpoint")
STACKED = "decoder.layers.mlp.router.expert_bias"


def save(folder: Path, step: int, tensors: dict[str, Any]) -> Path:
    """A distributed checkpoint with these, as torch writes it for Megatron."""
    from torch.distributed import checkpoint

    place = folder / f"iter_{step:07}"
    checkpoint.save(tensors, checkpoint_id=place, no_dist=True)
    (place / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    (folder / "latest_checkpointed_iteration.txt").write_text(str(step))
    return place


@given(st.integers(1, 4), st.integers(2, 9), st.integers(0, 2**31))
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_spreads_against_float64(tmp_path: Path, layers: int, experts: int, seed: int) -> None:
    values = torch.randn(layers, experts, generator=torch.Generator().manual_seed(seed))
    mtp = values[:1] * 2
    save(tmp_path, 5, {STACKED: values, "mtp.layers.0.mtp_model_layer.mlp.router.expert_bias": mtp, "other": values})
    found, skipped = bias.read(tmp_path, experts)
    assert skipped == []
    assert list(found[5]) == [*(f"layer_{n}" for n in range(layers)), "mtp_layer_0"]
    for row, of_layer in zip([*values, *mtp], found[5].values(), strict=True):
        assert of_layer.tolist() == row.tolist()
        wide = row.double().numpy()
        assert bias.spread(of_layer) == pytest.approx(wide.max() - wide.min(), rel=1e-6, abs=1e-7)


def test_a_checkpoint_without_a_bias_is_none(tmp_path: Path) -> None:
    save(tmp_path, 5, {"decoder.layers.mlp.router.weight": torch.ones(2, 4)})
    assert bias.read(tmp_path, 4) == ({}, [])
    assert bias.read(tmp_path / "none", 4) == ({}, [])


class Bomb:
    """Makes a folder where it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.trace),)


def test_a_hostile_checkpoint_runs_nothing(tmp_path: Path) -> None:
    place = save(tmp_path, 5, {STACKED: torch.ones(1, 4)})
    trace = tmp_path / "it ran"
    (place / ".metadata").write_bytes(pickle.dumps(Bomb(trace)))
    found, skipped = bias.read(tmp_path, 4)
    assert (found, len(skipped), trace.exists()) == ({}, 1, False)
    pickle.loads((place / ".metadata").read_bytes())
    assert trace.exists()  # it is one that would have


@pytest.mark.parametrize("seed", range(40))
def test_damaged_checkpoints_are_said(tmp_path: Path, seed: int) -> None:
    """Bytes turned, cut and doubled: a reason, or numbers of as many experts, and never an exception."""
    rng = random.Random(seed)
    place = save(tmp_path, 5, {STACKED: torch.ones(2, 4)})
    for path in (place / ".metadata", next(place.glob("*.distcp"))):
        data = bytearray(path.read_bytes())
        for _ in range(rng.randrange(1, 5)):
            at = rng.randrange(len(data))
            match rng.randrange(3):
                case 0:
                    data[at] = rng.randrange(256)
                case 1:
                    del data[at : at + rng.randrange(1, 100)]
                case 2:
                    data[at:at] = data[at : at + rng.randrange(1, 100)]
        path.write_bytes(data)
    found, skipped = bias.read(tmp_path, 4)
    assert len(skipped) <= 1
    assert all(len(values) == 4 and values.dtype == np.float32 for one in found.values() for values in one.values())
