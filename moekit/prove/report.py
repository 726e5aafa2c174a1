"""A proof as text: the steps side by side, each check against its bound, and the verdict in a sentence."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path

from moekit.prove import record
from moekit.prove.compare import ZEROS, Check, Pair, balance_loss
from moekit.prove.judge import Result
from moekit.recipe.load import show
from moekit.watch.metrics import LOSS

WIDTH = 110

PROVEN = {
    "one-expert": "an MoE of one expert is the dense model it was made of, and trains as it does",
    "slices": "the slices that a token is sent to add up to the dense layer they were cut from",
    "deterministic": "the recipe, trained twice, is the same training twice",
}


def sentence(result: Result) -> str:
    """The verdict: what is shown, or where it parts first and by how much."""
    parted = sorted((check for check in result.checks if not check.holds), key=lambda check: check.parts_at or 0)
    if not parted:
        return f"proven: {PROVEN[result.proof]}"
    first = parted[0]
    by = f"{_number(first.parts_by)}, where {_number(first.bound)} is allowed"
    return f"not proven: {first.what} parts at step {first.parts_at}, by {by}"


def lines(result: Result, without: Result | None = None) -> Iterator[str]:
    """The report, a line each, without a line's end."""
    yield from textwrap.wrap(result.alignment, WIDTH)
    yield ""
    yield from _table(result)
    yield ""
    yield from _checks(result.checks)
    if without:
        yield ""
        yield f"without deterministic mode, `{without.runs[0].name}` and `{without.runs[1].name}` for comparison:"
        yield from _differences(without.checks)
    yield ""
    yield sentence(result)


def _table(result: Result) -> Iterator[str]:
    one, other = ("first", "second") if result.proof == "deterministic" else ("dense", "MoE")
    zeros = result.proof != "slices"  # of them only one side's experts have any by chance
    balance = zeros and any(balance_loss(pair.second) is not None for pair in result.pairs)
    header = f"{'step':>4}{f'loss {one}':>13}{f'loss {other}':>13}{'difference':>12}"
    header += f"{f'zeros {one}':>14}{f'zeros {other}':>14}" if zeros else ""
    yield header + (f"{'balance loss':>14}" if balance else "")
    for pair in result.pairs:
        row = _losses(pair)
        row += "".join(f"{_plain(side.get(ZEROS), ',.0f'):>14}" for side in (pair.first, pair.second)) if zeros else ""
        yield row + (f"{_plain(balance_loss(pair.second), '.6f'):>14}" if balance else "")


def _losses(pair: Pair) -> str:
    first, second = pair.first.get(LOSS), pair.second.get(LOSS)
    apart = None if first is None or second is None else second - first
    difference = "0" if apart == 0 else _plain(apart, ".1e")
    return f"{pair.step:>4}{_plain(first, '.6f'):>13}{_plain(second, '.6f'):>13}{difference:>12}"


def _plain(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _checks(checks: list[Check]) -> Iterator[str]:
    width = max(len(check.what) for check in checks)
    for check in checks:
        verdict = "holds" if check.holds else f"parts at step {check.parts_at}"
        bound = f"allowed {_number(check.bound)}"
        yield f"  {check.what:{width}}  at most {_number(check.largest)}, {bound}: {verdict}"


def _differences(checks: list[Check]) -> Iterator[str]:
    width = max(len(check.what) for check in checks)
    for check in checks:
        since = "never differs" if check.holds else f"differs from step {check.parts_at} on"
        yield f"  {check.what:{width}}  at most {_number(check.largest)}: {since}"


def _number(value: float | None) -> str:
    """Few digits, also of what is small."""
    return "-" if value is None else f"{value:.3g}"


def status(root: Path) -> Iterator[str]:
    """Which proofs are on record, for which software."""
    for name in record.NAMES:
        found = record.read(root, name)
        if not found:
            yield f"{name}: not on record; `moekit prove {name}` makes it"
        for one in found:
            yield f"{name}: {one['verdict']} on {one['when']}, with {record.software_text(one['software'])}"
            if one["verdict"] != "passed":
                yield f"    {one['sentence']}"
    yield f"records are kept in {show(root / 'proofs')}"
