"""Token-to-expert tables for hash layers: which experts each token id is sent to, whatever stands around it.

Nothing balances a hash layer in training, so its table decides how even the experts' load is (handbook 3.2). The greedy
one spreads the most frequent tokens over the least loaded experts (Roller et al., 2021, "balanced assignment"); the two
others are for comparison. A table has the shape (token id, choice), its ids are experts from 0, a row's all different.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Counts = NDArray[np.int64]
    """How often each token id occurs. (token id,)"""
    Table = NDArray[np.int32]
    """The experts of each token id. (token id, choice)"""

METHODS = ("greedy", "random", "round-robin")
ROWS_AT_A_TIME = 4096


def make_table(method: str, counts: Counts, experts: int, topk: int, seed: int = 0) -> Table:
    """A table by one of `METHODS`; `topk` may not exceed `experts`. `seed` is for `random`."""
    if method == "greedy":
        return greedy(counts, experts, topk)
    return at_random(len(counts), experts, topk, seed) if method == "random" else in_turns(len(counts), experts, topk)


def greedy(counts: Counts, experts: int, topk: int) -> Table:
    """Tokens by falling frequency, each to the least loaded experts; ids that never occur, to those with the fewest.

    At its end no expert has more load above another than the most frequent token brings: an expert is only given a
    token while it is one of the least loaded.
    """
    import numpy as np

    table = np.empty((len(counts), topk), np.int32)
    order = np.argsort(-counts, kind="stable")
    seen = int(np.count_nonzero(counts))
    _deal(table, order[:seen], counts[order[:seen]], np.zeros(experts, np.int64))
    rows = np.bincount(table[order[:seen]].ravel(), minlength=experts)
    _deal(table, order[seen:], np.ones(len(counts) - seen, np.int64), rows)
    return table


def _deal(table: Table, ids: NDArray[np.int64], weights: NDArray[np.int64], load: NDArray[np.int64]) -> None:
    """Fill the rows of `ids` in, in this order; an expert's load grows by the weight of each id that it gets."""
    heap = [(held, expert) for expert, held in enumerate(load.tolist())]
    heapq.heapify(heap)
    topk = table.shape[1]
    for token, weight in zip(ids.tolist(), weights.tolist(), strict=True):
        least = [heapq.heappop(heap) for _ in range(topk)]
        table[token] = [expert for _, expert in least]
        for held, expert in least:
            heapq.heappush(heap, (held + weight, expert))


def at_random(vocab_size: int, experts: int, topk: int, seed: int) -> Table:
    """Different experts for each token id, each set as likely as any other."""
    import numpy as np

    random = np.random.default_rng(seed)
    table = np.empty((vocab_size, topk), np.int32)
    for start in range(0, vocab_size, ROWS_AT_A_TIME):
        rows = table[start : start + ROWS_AT_A_TIME]
        rows[:] = random.random((len(rows), experts)).argsort(axis=1)[:, :topk]
    return table


def in_turns(vocab_size: int, experts: int, topk: int) -> Table:
    """Id `i` to the experts `i`, `i + 1`, ...: Megatron's placeholder (core/transformer/moe/router.py:322)."""
    import numpy as np

    return ((np.arange(vocab_size)[:, None] + np.arange(topk)) % experts).astype(np.int32)


def load_of(table: Table, counts: Counts, experts: int) -> NDArray[np.int64]:
    """Tokens that each expert gets, of a table that knows every id counted. (expert,)"""
    import numpy as np

    load = np.zeros(experts, np.int64)
    for choice in table.T:
        np.add.at(load, choice[: len(counts)], counts)
    return load


def max_vio(load: NDArray[np.int64]) -> float:
    """How far the busiest expert exceeds an even share: 0 is even (handbook 3.2)."""
    return float(load.max() / load.mean() - 1) if load.any() else 0.0


def least_max_vio(counts: Counts, experts: int, topk: int) -> float:
    """What no table gets below: the most frequent token alone loads each of its experts that much."""
    return max(0.0, float(counts.max() * experts / (counts.sum() * topk) - 1)) if counts.any() else 0.0


def problem_of(table: NDArray[np.int64], experts: int | None) -> str | None:
    """Why an array is no table for so many experts, a clause about it; None where it is one."""
    import numpy as np

    if table.ndim != 2 or table.dtype.kind not in "iu":
        return f"has the shape {table.shape} and type {table.dtype}, and a table is (token id, choice) of integers"
    if not table.size:
        return f"is empty, of the shape {table.shape}"
    if table.min() < 0 or (experts is not None and table.max() >= experts):
        number = int(table.min() if table.min() < 0 else table.max())
        return (
            f"sends tokens to expert {number}, and there are {experts}, from 0" if experts else "has negative experts"
        )
    ordered = np.sort(table, axis=1)
    if (same := (ordered[:, 1:] == ordered[:, :-1]).any(axis=1)).any():
        return f"sends token {int(same.argmax())} to one expert twice"
    return None
