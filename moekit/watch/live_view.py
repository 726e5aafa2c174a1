"""The live view as text: made from values alone, fits 80 columns and 24 rows, and grows with the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from datetime import datetime

from rich.text import Text

from moekit.problems import CONTROL
from moekit.watch.chart import curve, levels, neighbours
from moekit.watch.derive import RMS_LOGSUMEXP
from moekit.watch.metrics import LOSS
from moekit.watch.watching import TOKENS_PER_S, LayerLoad, Picture

_MIN_WIDTH, _MIN_HEIGHT = 60, 20
_HIGH_VIO = 2.0
"""MaxVio of a full block: three times an even share."""
_LEVEL_STYLES = {"info": "cyan", "warn": "yellow", "error": "bold red"}
_SCOPE = {
    ("micro batch",): "balanced per micro batch",
    ("global batch",): "balanced per global batch",
    ("micro batch", "global batch"): "balanced per global batch, read in both",
    ("sequence",): "balanced per sequence, which these counts cannot show",
}


def render_live(picture: Picture, width: int, height: int) -> Text:
    """The view in `width` columns and at most `height` rows; no row is longer. `.plain` is the same without colour."""
    width, height = max(width, _MIN_WIDTH), max(height, _MIN_HEIGHT)
    head, body = list(_title(picture)), [*_numbers(picture), *_router(picture, width)]
    notes = [Text(f"  {sentence}", "yellow") for sentence in picture.missing]
    alerts = _alerts(picture, max(3, height - 21))
    used = len(head) + len(body) + len(notes) + len(alerts) + 4
    charts = _charts(picture, width, max(3, min(height - used, height // 2)))
    rows = [
        row if not CONTROL.search(row.plain) else Text(CONTROL.sub("?", row.plain))
        for row in [*head, *charts, *body, *notes, *alerts]
    ]
    for row in rows:
        row.rstrip()
        row.truncate(width, overflow="ellipsis")
    return Text("\n").join(rows[:height])


def plain_line(picture: Picture) -> str:
    """The newest numbers in one line, for a log or a pipe."""
    latest = picture.latest
    scope, vio = _vio(picture)
    parts = [
        f"step {picture.step:,}" + (f"/{picture.facts.train_iters:,}" if picture.facts.train_iters else ""),
        f"attempt {picture.attempt}",
        *([f"lm loss {latest[LOSS]:.4f}"] if LOSS in latest else []),
        *([f"MaxVio {vio:.3f} ({scope})"] if vio is not None else []),
        *([f"{latest[TOKENS_PER_S]:,.0f} tokens/s"] if TOKENS_PER_S in latest else []),
        *([f"{latest['throughput']:.1f} TFLOP/s"] if "throughput" in latest else []),
        *([f"grad norm {latest['grad-norm']:.3g}"] if "grad-norm" in latest else []),
    ]
    return "  ".join(parts)


def alert_line(attempt: int, step: int, time: float, level: str, title: str, text: str) -> str:
    """An alert in one line."""
    return CONTROL.sub("?", f"{_clock(time)} {level} step {step:,} attempt {attempt}: {title}; {text}")


def _title(picture: Picture) -> Iterator[Text]:
    row = Text("  ")
    row.append(picture.name, "bold")
    row.append(f"  {picture.state}")
    yield row
    if not picture.attempt:
        yield Text("  no metrics yet", "dim")
        return
    of = f" of {picture.facts.train_iters:,}" if picture.facts.train_iters else ""
    logged = datetime.fromtimestamp(picture.time).strftime("%Y-%m-%d %H:%M:%S")
    at = f"  step {picture.step:,}{of}, attempt {picture.attempt}, logged at {logged}"
    yield Text(at, "dim")


def _charts(picture: Picture, width: int, rows: int) -> list[Text]:
    """LM loss, MaxVio and speed beside each other, over the same steps."""
    scope, name = _vio_curve(picture)
    wanted = [
        ("LM loss", LOSS, "cyan", "{:.2f}".format),
        (f"MaxVio, {scope}", name, "magenta", "{:.2f}".format),
        ("tokens/s", TOKENS_PER_S, "green", short),
    ]
    shown = [one for one in wanted if len(picture.curves.get(one[1], ())) > 1]
    if not shown:
        return []
    every = [x for _, curve_name, _, _ in shown for x, _ in picture.curves[curve_name]]
    each = width // len(shown) - 1
    text = [Text() for _ in range(rows + 3)]
    for title, curve_name, style, label in shown:
        drawn = curve(picture.curves[curve_name], [], each - 2, rows, label, (min(every), max(every)))
        _beside(text, [Text(title, "bold"), *(_coloured(line, style) for line in drawn)], each)
    return text


def _beside(rows: list[Text], more: Sequence[Text], width: int) -> None:
    for row, new in zip(rows, more, strict=True):
        new.truncate(width - 2)
        row.append("  ")
        row.append_text(new)
        row.append(" " * (width - 2 - new.cell_len) + " ")


def _coloured(line: str, style: str) -> Text:
    text = Text()
    for character in line:
        text.append(character, style if "\u2800" < character <= "\u28ff" else "dim")
    return text


def _numbers(picture: Picture) -> Iterator[Text]:
    """The newest values, a few a row; those that are not logged are left out."""
    latest, facts = picture.latest, picture.facts
    best = f" (best {picture.best_loss:.3f})" if picture.best_loss is not None else ""
    losses = [(f"mtp {name[4:-5]} loss", f"{latest[name]:.3f}") for name in sorted(latest) if _is_mtp(name)][:3]
    lines = [
        [
            ("lm loss", f"{latest.get(LOSS, math.nan):.3f}{best}"),
            *losses,
            _one(latest, "grad-norm", "grad norm", ".3g"),
        ],
        [
            _one(latest, TOKENS_PER_S, "tokens/s", ",.0f"),
            _one(latest, "throughput", "TFLOP/s a GPU", ".1f"),
            _one(latest, "iteration-time", "s a step", ".3g"),
        ],
        [
            *(
                (name.replace("_", " "), f"{latest[name]:.4f} (even: {facts.aux_floor:.3g})")
                for name in facts.aux_losses
                if name in latest
            ),
            _one(latest, RMS_LOGSUMEXP, "RMS logsumexp (z-loss)", ".2f"),
        ],
    ]
    if not picture.attempt:
        return
    for line in lines:
        row = Text("  ")
        for name, value in filter(None, line):
            row.append(f"{name} ", "dim")
            row.append(f"{value}   ", "bold")
        if len(row) > 2:
            yield row


def _one(latest: dict[str, float], name: str, shown: str, form: str) -> tuple[str, str] | None:
    return (shown, format(latest[name], form)) if name in latest else None


def _is_mtp(name: str) -> bool:
    return name.startswith("mtp_") and name.endswith(" loss")


def _router(picture: Picture, width: int) -> Iterator[Text]:
    latest, facts = picture.latest, picture.facts
    if not picture.layers:
        return
    both = "micro batch" in facts.scopes and "global batch" in facts.scopes
    head = Text("  Router", "bold")
    head.append(f", step {picture.counted_step:,}, {facts.balancing}: {_scope(facts.scopes)}", "dim")
    yield head
    row = Text("  ")
    for name, value in _router_values(latest, both, _vio(picture)[0]):
        row.append(f"{name} ", "dim")
        row.append(f"{value}  ", "bold")
    yield row
    for scope in ("micro batch", "global batch") if both else (_vio(picture)[0],):
        yield _strip(picture.layers, scope, width)
    names = [layer.name.replace("_", " ") for layer in picture.layers]
    shared = neighbours(len(names), width - 20)
    legend = f"{names[0]} to {names[-1]}" if len(names) > 1 else names[0]
    each = f", each block the worst of {shared}" if shared > 1 else ""
    yield Text(f"  {legend}{each}; ▁ even, █ the busiest expert has 3 times its share", "dim")


def _router_values(latest: dict[str, float], both: bool, scope: str) -> Iterator[tuple[str, str]]:
    micro, whole = latest.get("router/max_vio_micro"), latest.get("router/max_vio")
    if both and micro is not None and whole is not None:
        yield "MaxVio", f"{micro:.2f} micro, {whole:.2f} global, gap {micro - whole:.2f}"
    else:
        yield f"MaxVio, {scope}", f"{(micro if scope == 'micro batch' else whole) or 0.0:.2f}"
    yield "dead experts", f"{latest.get('router/dead_experts', 0):.0f}"
    if "router/busiest_rank" in latest:
        yield f"rank {latest['router/busiest_rank']:.0f}", f"{latest['router/rank_imbalance']:.2f} of mean"


def _strip(layers: Sequence[LayerLoad], scope: str, width: int) -> Text:
    micro = scope == "micro batch"
    values = [(one.max_vio_micro if micro else one.max_vio_global) or 0.0 for one in layers]
    row = Text(f"  {scope:<12}  ", "dim")
    for block, value in levels(values, width - 20, _HIGH_VIO):
        row.append(block, "green" if value <= 0.5 else "yellow" if value <= 1 else "red")
    return row


def _scope(scopes: tuple[str, ...]) -> str:
    if "sequence" in scopes and len(scopes) > 1:
        return f"{_SCOPE.get(scopes[:-1], '')}; its part per sequence these counts cannot show"
    return _SCOPE.get(scopes, "")


def _vio(picture: Picture) -> tuple[str, float | None]:
    """MaxVio in the scope of the balancer, and which that is; the global batch's where it is another one."""
    if "micro batch" in picture.facts.scopes:
        return "micro batch", picture.latest.get("router/max_vio_micro")
    return "global batch", picture.latest.get("router/max_vio")


def _vio_curve(picture: Picture) -> tuple[str, str]:
    scope, _ = _vio(picture)
    return scope, "router/max_vio_micro" if scope == "micro batch" else "router/max_vio"


def _alerts(picture: Picture, most: int) -> list[Text]:
    """The newest alerts, those that hold first; a row says when there are more."""
    active = [alert for alert in picture.alerts if alert.key in picture.active]
    last = {alert.key: alert for alert in active}
    ended = [alert for alert in picture.alerts if last.get(alert.key) is not alert]
    if not picture.alerts:
        return [Text("  no alerts", "dim")] if picture.attempt else []
    rows = []
    for alert in [*reversed(last.values()), *reversed(ended)][:most]:
        over = last.get(alert.key) is not alert
        row = Text(f"  {_when(alert.time, picture.time)} step {alert.step:,}, attempt {alert.attempt}: ", "dim")
        row.append(alert.title, "dim" if over else _LEVEL_STYLES[alert.level])
        row.append(" (over)" if over else f"; {alert.text}", "dim")
        rows.append(row)
    return rows


def short(value: float) -> str:
    """A large number in four or five characters: 950, 12.3k, 1.25M."""
    for power, letter in ((9, "G"), (6, "M"), (3, "k")):
        if abs(value) >= 10**power:
            return f"{value / 10**power:.3g}{letter}"
    return f"{value:.3g}"


def _clock(time: float) -> str:
    return datetime.fromtimestamp(time).strftime("%H:%M:%S")


def _when(time: float, now: float) -> str:
    """On the clock, or with the day where it was another one."""
    at = datetime.fromtimestamp(time)
    return at.strftime("%H:%M:%S" if at.date() == datetime.fromtimestamp(now).date() else "%m-%d %H:%M")
