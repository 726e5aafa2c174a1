"""A hash layer's table, put in. The installed Megatron has no hash layers: a checkout that has them is trained where
`MOEKIT_TEST_HASH_CHECKOUT` names one, such as Megatron-LM's branch `dev`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from job_runs import EXPERT_PARALLEL, JOB, TINY_MOE

from moekit.data.hash_table.table import at_random, in_turns
from moekit.job import hash_table

pytestmark = pytest.mark.megatron
CHECKOUT = os.environ.get("MOEKIT_TEST_HASH_CHECKOUT")


def hash_router() -> Any:
    """A class that makes its table as Megatron's routers do: a buffer, filled in turns for the first layers."""
    import torch

    class HashRouter(torch.nn.Module):
        def __init__(self, layer_number: int | None, hash_layers: int = 2, rows: int = 64) -> None:
            super().__init__()
            self.config = SimpleNamespace(moe_num_hash_layers=hash_layers, is_hybrid_model=False)
            self.num_experts, self.rows, self.layer_number, self.is_hash_layer = 8, rows, layer_number, False
            self.register_buffer("tid2eid", None)
            if layer_number is not None:
                self.set_layer_number(layer_number)

        def set_layer_number(self, layer_number: int) -> None:
            self.layer_number = layer_number
            self.is_hash_layer = layer_number <= self.config.moe_num_hash_layers
            if self.is_hash_layer and self.tid2eid is None:
                self.tid2eid = torch.from_numpy(in_turns(self.rows, 8, 2))

    return HashRouter


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[np.ndarray], Any]:
    """The class of routers, with tables put in."""
    router = pytest.importorskip("megatron.core.transformer.moe.router")

    def install(tables: np.ndarray) -> Any:
        np.save(tmp_path / "table.npy", tables)
        monkeypatch.setenv("MOEKIT_HASH_TABLE", str(tmp_path / "table.npy"))
        monkeypatch.setattr(router, "TopKRouter", hash_router())
        (said,) = hash_table.install()
        assert said["name"] == "hash_table"
        assert str(tmp_path / "table.npy") in said["why"]
        return router.TopKRouter

    return install


def test_one_table_is_that_of_every_hash_layer(installed: Callable[[np.ndarray], Any]) -> None:
    table = at_random(64, 8, 2, seed=0)
    router_class = installed(table[None])
    for number in (1, 2):
        assert np.array_equal(router_class(number).tid2eid.numpy(), table)
    assert router_class(3).tid2eid is None
    numbered_later = router_class(None)
    numbered_later.set_layer_number(2)
    assert np.array_equal(numbered_later.tid2eid.numpy(), table)


def test_each_hash_layer_has_its_own(installed: Callable[[np.ndarray], Any]) -> None:
    tables = np.stack([at_random(64, 8, 2, seed) for seed in (1, 2)])
    router_class = installed(tables)
    for number in (1, 2):
        assert np.array_equal(router_class(number).tid2eid.numpy(), tables[number - 1])
    assert router_class(3).tid2eid is None
    with pytest.raises(SystemExit, match="there are 2 tables and 1 hash layers"):
        router_class(1, hash_layers=1)


def test_the_padding_of_the_vocabulary_stays_as_it_was(installed: Callable[[np.ndarray], Any]) -> None:
    table = at_random(50, 8, 2, seed=0).astype(np.int64)
    held = installed(table[None])(1).tid2eid.numpy()
    assert held.dtype == np.int32
    assert np.array_equal(held, np.concatenate([table, in_turns(64, 8, 2)[50:]]))


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (at_random(64, 8, 3, 0), "it has 64 token ids x 3 choices of experts 0 to 7, not 64 x 2 of 8 experts, from 0"),
        (at_random(65, 8, 2, 0), "it has 65 token ids x 2 choices"),
        (at_random(64, 9, 2, 0), "of experts 0 to 8, not 64 x 2 of 8 experts"),
        (at_random(64, 8, 2, 0) - 1, "of experts -1 to 6"),
    ],
)
def test_a_table_for_another_model_ends_the_run(
    installed: Callable[[np.ndarray], Any], table: np.ndarray, said: str
) -> None:
    router_class = installed(table[None])
    with pytest.raises(SystemExit) as end:
        router_class(1)
    assert said in str(end.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "cannot be read: [Errno 2]"), (b"text", "cannot be read: "), (in_turns(64, 8, 2), "has the shape (64, 2)")],
)
def test_what_is_no_table_ends_the_run(tmp_path: Path, content: Any, said: str) -> None:
    file = tmp_path / "table.npy"
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif content is not None:
        np.save(file, content)
    with pytest.raises(SystemExit) as end:
        hash_table.read(str(file))
    assert said in str(end.value)


def test_without_a_table_nothing_is_put_in(monkeypatch: pytest.MonkeyPatch) -> None:
    router = pytest.importorskip("megatron.core.transformer.moe.router")
    monkeypatch.delenv("MOEKIT_HASH_TABLE", raising=False)
    before = router.TopKRouter.__init__
    assert hash_table.install() == []
    assert router.TopKRouter.__init__ is before


def test_a_megatron_without_hash_layers_ends_the_run(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    np.save(tmp_path / "table.npy", in_turns(512, 8, 2)[None])
    env = {"MOEKIT_ATTEMPT": "1", "MOEKIT_DEVICE": "cpu", "MOEKIT_HASH_TABLE": "table.npy", "RANK": "0"}
    done = subprocess.run(
        [sys.executable, JOB / "entry.py"],
        cwd=tmp_path,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )
    said = "the recipe's hash table, table.npy, has no place in this Megatron: it has no hash layers"
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, said)
    assert json.loads((tmp_path / "attempts/1/exit/rank0.json").read_text())["reason"] == f"SystemExit: {said}"


if CHECKOUT:

    @pytest.mark.train
    def test_training_sends_tokens_where_the_table_says(tmp_path: Path, launch: Callable[..., None]) -> None:
        source = Path(CHECKOUT, "megatron/core/transformer/transformer_config.py").read_text()
        option = "--moe-num-hash-layers" if "moe_num_hash_layers:" in source else "--moe-n-hash-layers"
        for name, experts in (("first", [3, 6]), ("other", [0, 1])):
            np.save(tmp_path / f"{name}.npy", np.tile(np.array([experts], np.int32), (512, 1))[None])
        argv = [*TINY_MOE, *EXPERT_PARALLEL, option, "2", "--train-iters", "4", "--eval-interval", "100"]
        argv += ["--save", "checkpoints", "--save-interval", "2", "--save-tokens-per-expert-interval", "1"]
        variables = {"MOEKIT_MEGATRON": CHECKOUT}
        launch(tmp_path, [*argv, "--exit-interval", "2"], env=variables | {"MOEKIT_HASH_TABLE": "first.npy"})
        resumed = variables | {"MOEKIT_HASH_TABLE": "other.npy"}
        launch(tmp_path, [*argv, "--load", "checkpoints"], attempt=2, env=resumed)  # the checkpoint's table wins
        for rank, expert in ((0, 3), (1, 2)):  # 3 and 6 of 8, each rank's own counted from 0
            lines = (tmp_path / f"checkpoints/tokens_per_expert/rank{rank}.jsonl").read_text().splitlines()
            assert len(lines) == 8  # four iterations of two layers
            for line in lines:
                assert all(
                    one > 0 if here == expert else one == 0
                    for loads in json.loads(line)["tpe"]
                    for here, one in enumerate(loads)
                )
        assert "hash_table" in (tmp_path / "attempts/1/installed.json").read_text()
