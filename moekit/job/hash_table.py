"""The recipe's token-to-expert table, put into hash layers before training: `MOEKIT_HASH_TABLE` names its file.

Megatron fills a hash layer's `tid2eid` with a placeholder that sends ids in turns, and leaves it to the trainer to load
another (megatron/core/transformer/moe/router.py:313 of the handbook's commit, d6316eb45; :208 of branch `dev`). The
table is put in as a router is built, so a checkpoint that is loaded after it wins: a run goes on with its own.

The file is `.npy`, of integers: (table, token id, choice), one table for all hash layers or one for each in order. It
has the tokenizer's ids; Megatron's rows behind them, the padding of its vocabulary, are no token's, and stay.
"""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any

Installed = dict[str, str]
SOURCE = "megatron/core/transformer/moe/router.py: TopKRouter"


def install() -> list[Installed]:
    """Have every hash router built with the table of `MOEKIT_HASH_TABLE`; nothing where that is unset.

    Raises:
        SystemExit: the file is no such table, or this Megatron's routers have no `tid2eid` to put it into.
    """
    path = os.environ.get("MOEKIT_HASH_TABLE")
    if not path:
        return []
    from megatron.core.transformer.moe.router import TopKRouter

    if "tid2eid" not in inspect.getsource(TopKRouter):
        raise SystemExit(f"the recipe's hash table, {path}, has no place in this Megatron: it has no hash layers")
    tables = read(path)
    build, renumber = TopKRouter.__init__, TopKRouter.set_layer_number

    def build_with_table(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        fill(self, tables)

    def renumber_with_table(self: Any, layer_number: int) -> None:
        renumber(self, layer_number)
        fill(self, tables)

    TopKRouter.__init__, TopKRouter.set_layer_number = build_with_table, renumber_with_table
    return [
        {"name": "hash_table", "why": f"hash layers begin with {path} and not with a placeholder", "source": SOURCE}
    ]


def read(path: str) -> Any:
    """The tables of a file, as they are kept. (table, token id, choice)"""
    import numpy as np

    try:
        tables = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as reason:
        raise SystemExit(f"the recipe's hash table, {Path(path).absolute()}, cannot be read: {reason}") from None
    if tables.ndim != 3 or tables.dtype.kind not in "iu" or not tables.size:
        raise SystemExit(
            f"the recipe's hash table, {path}, has the shape {tables.shape}, and not three axes of integers"
        )
    return tables


def fill(router: Any, tables: Any) -> None:
    """Put a router's table in, where it is one of a hash layer.

    Raises:
        SystemExit: the table is for other experts or another vocabulary than the router.
    """
    held = getattr(router, "tid2eid", None)
    if held is None or not router.is_hash_layer:
        return
    import torch

    table = _table_of(router, tables)
    rows, choices = held.shape
    if held.is_meta:
        raise SystemExit("a hash table cannot be put into a model that is built on the meta device")
    if table.shape[1] != choices or len(table) > rows or not 0 <= table.min() <= table.max() < router.num_experts:
        said = f"{len(table):,} token ids x {table.shape[1]} choices of experts {table.min()} to {table.max()}"
        wanted = f"{rows:,} x {choices} of {router.num_experts} experts, from 0"
        raise SystemExit(
            f"the recipe's hash table does not fit layer {router.layer_number}: it has {said}, not {wanted}"
        )
    with torch.no_grad():
        held[: len(table)] = torch.from_numpy(table).to(held)


def _table_of(router: Any, tables: Any) -> Any:
    """The only table, or that of the router's layer, which Megatron counts from 1."""
    if len(tables) == 1:
        return tables[0]
    config = router.config
    layers = getattr(config, "moe_num_hash_layers", None) or getattr(config, "moe_n_hash_layers", None)
    if getattr(config, "is_hybrid_model", False) or len(tables) != layers or not 1 <= router.layer_number <= layers:
        what = f"there are {len(tables)} tables and {layers} hash layers, and only a GPT stack's can have one each"
        raise SystemExit(f"the recipe's hash table does not fit layer {router.layer_number}: {what}")
    return tables[router.layer_number - 1]
