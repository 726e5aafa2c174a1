"""The end-of-run summary as text: made from values alone, readable without colour, from 60 columns on."""

from __future__ import annotations

import textwrap

from rich.text import Text

from moekit.watch.chart import curve, neighbours, shares
from moekit.watch.summary import LAST_STEPS, Balance, SummaryData

_MIN_WIDTH = 60
_CHART_ROWS = 10
_CLEARLY_LESS = 2 / 3
"""Only a fall of MaxVio to this part of what it was is put down to the auxiliary loss."""
_LAYER_ROWS = 16
"""More layers than this: those that are least even at the end."""


def render_summary(data: SummaryData, width: int) -> Text:
    """The summary, in `width` columns; commands and paths are never broken, so print it with `soft_wrap=True`.

    `.plain` is the same without colour.
    """
    width = max(width, _MIN_WIDTH)
    text = Text()
    _title(text, data)
    if data.loss:
        _loss(text, data, width)
    _numbers(text, data)
    if data.balance is not None:
        _router(text, data.balance, width)
    for sentence in data.missing:
        text.append("\n")
        _paragraph(text, sentence, width, "yellow")
    _next(text, data)
    return text


def _title(text: Text, data: SummaryData) -> None:
    of = f" of {data.train_iters:,}" if data.train_iters else ""
    state = f"finished at iteration {data.step:,}{of}" if data.finished else f"stopped at iteration {data.step:,}{of}"
    more = f", in {data.attempts} attempts" if data.attempts > 1 else ""
    text.append(f"  {data.name}", "bold")
    text.append(f"  {state}{more}\n")


def _loss(text: Text, data: SummaryData, width: int) -> None:
    text.append("\n  Loss", "bold")
    text.append(", nats per token, by iteration", "dim")
    text.append("    ── training", "cyan")
    text.append("   ◆ validation\n" if data.validation else "\n", "magenta")
    for row in curve(data.loss, data.validation, width - 4, _CHART_ROWS):
        text.append("  ")
        for character in row:
            text.append(
                character, "magenta" if character == "◆" else "cyan" if "\u2800" < character <= "\u28ff" else "dim"
            )
        text.append("\n")


def _numbers(text: Text, data: SummaryData) -> None:
    rows = []
    if data.final_loss is not None:
        rows.append(("lm loss", f"{data.final_loss:.3f}", f"mean of the last {_last_steps(data)}"))
    if data.validation:
        step, loss = data.validation[-1]
        rows.append(("validation loss", f"{loss:.3f}", f"at iteration {step:,}"))
    if data.tokens_per_s is not None:
        rows.append(("speed", f"{data.tokens_per_s:,.0f}", "tokens/s, all processes together"))
    tokens = "" if data.tokens is None else f"for {data.tokens:,} tokens"
    rows.append(("training time", _duration(data.training_s), tokens))
    column = max(len(value) for _, value, _ in rows)
    text.append("\n")
    for name, value, note in rows:
        text.append(f"  {name:<17}")
        text.append(f"{value:>{column}}", "bold")
        text.append(f"  {note}\n".rstrip(" "), "dim")


def _last_steps(data: SummaryData) -> str:
    """What the final loss is the mean of: Megatron may log every tenth iteration only."""
    last = [step for step, _ in data.loss[-LAST_STEPS:]]
    in_a_row = last[-1] - last[0] == len(last) - 1
    return f"{len(last)} {'' if in_a_row else 'logged '}iterations"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _router(text: Text, balance: Balance, width: int) -> None:
    layers = balance.layers
    if len(layers) > _LAYER_ROWS:
        least_even = sorted(layers, key=lambda layer: -layer.max_vio_after)[:_LAYER_ROWS]
        layers = [layer for layer in layers if layer in least_even]
    names = [layer.name.replace("_", " ") for layer in layers]
    margin = max(len(name) for name in [*names, "mean"])
    strip = (width - margin - 24) // 2
    used = sum(len(block) for block, _ in shares(layers[0].load_before, strip))
    column = max(used, 18)

    text.append("\n  Router", "bold")
    text.append(", tokens by expert and MaxVio", "dim")
    if len(layers) < len(balance.layers):
        text.append(f", the {len(layers)} least even of {len(balance.layers)} layers", "dim")
    before, after = _span(balance.iterations_before), _span(balance.iterations_after)
    text.append(f"\n  {'':<{margin}}  {before:<{column + 6}}    {after:<{column + 6}}".rstrip() + "\n", "dim")
    for name, layer in zip(names, layers, strict=True):
        text.append(f"  {name:<{margin}}")
        halves = ((layer.load_before, layer.max_vio_before), (layer.load_after, layer.max_vio_after))
        for gap, (load, vio) in zip(("  ", "    "), halves, strict=True):
            text.append(gap)
            for block, ratio in shares(load, strip):
                text.append(block, _colour(ratio))
            text.append(" " * (column - used) + f"{vio:>6.2f}")
        text.append("\n")
    means = f"{balance.max_vio_before:>{column + 6}.2f}", f"{balance.max_vio_after:>{column + 6}.2f}"
    text.append(f"  {'mean':<{margin}}  {means[0]}    {means[1]}\n", "bold")
    shared = neighbours(balance.experts, strip)
    which = f"each block the busiest of {shared} experts; " if shared > 1 else ""
    legend = f"{which}▄ an even share, █ twice that or more, · nothing; blocks add up iterations, MaxVio is their mean"
    _paragraph(text, legend, width, "dim")
    text.append("\n")
    _paragraph(text, _meaning(balance), width)


def _span(iterations: tuple[int, int]) -> str:
    first, last = iterations
    return f"iteration {first:,}" if first == last else f"iterations {first:,}-{last:,}"


def _colour(ratio: float) -> str:
    """Green within a quarter of the even share, yellow within a half, red beyond."""
    off = abs(ratio - 1)
    return "green" if off <= 0.25 else "yellow" if off <= 0.5 else "red"


def _meaning(balance: Balance) -> str:
    """What MaxVio is, where it went, and what may be concluded from it."""
    what = (
        "MaxVio is how far the busiest expert of a layer exceeds an even share: 0 is perfectly even, "
        f"{balance.ceiling:g} is every token on the same {balance.topk} of {balance.experts} experts."
    )
    where = f"It went from {balance.max_vio_before:.2f} to {balance.max_vio_after:.2f}."
    if not any("aux_loss" in kind for kind in balance.balancing):
        return f"{what} {where}"
    if balance.max_vio_after >= balance.max_vio_before:
        return f"{what} {where} The auxiliary loss has not made the load more even here."
    if balance.max_vio_after > balance.max_vio_before * _CLEARLY_LESS:
        return f"{what} {where} That is too little to tell whether the auxiliary loss has done it."
    return f"{what} {where} That is the auxiliary loss at work; more even load is not by itself a better lm loss."


def _next(text: Text, data: SummaryData) -> None:
    places = [("metrics", f"{data.run_dir}/attempts/*/metrics.jsonl")]
    *tunnel, dashboard = data.dashboard
    places += [("from your machine", line) for line in tunnel]
    places += [("dashboard", dashboard), ("another run", data.relaunch)]
    column = max(len(name) for name, _ in places)
    text.append("\n")
    for name, line in places:
        text.append(f"  {name:<{column}}  ", "dim")
        text.append(f"{line}\n")


def _paragraph(text: Text, words: str, width: int, style: str = "") -> None:
    for line in textwrap.wrap(words, width - 4, break_long_words=False, break_on_hyphens=False):
        text.append(f"  {line}\n", style)
