"""The small languages Megatron reads from an argument, read by a grammar of our own: never evaluated, bounded.

Megatron hands `--moe-layer-freq` to `eval` and expands a pipeline layout by regular expressions, so a slip there is a
traceback, a wrong model or a full memory. The texts reach the command line exactly as written.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MOST_LAYERS = 10_000
"""Longest expansion a text may have; the largest published models have a few hundred layers."""

MOST_CHARACTERS = 4_096
"""Longest text of any of them."""
MOST_BRACKETS = 100
"""Most `(` of a layer pattern; Python, which Megatron hands it to, stops at 200 inside each other."""

_TOKEN = re.compile(r"[0-9]+|[\[\]()+*,]")


@dataclass(frozen=True, slots=True)
class LayerPattern:
    """Which layers are MoE (`--moe-layer-freq`, megatron/training/arguments.py:326 at 0.19.2)."""

    text: str
    period: int | None
    """N of "every N-th layer, beginning with the first"; None for an explicit pattern."""
    layers: tuple[int, ...]
    """One 0 (dense) or 1 (MoE) for each layer; empty with `period`."""

    @classmethod
    def parse(cls, text: str) -> LayerPattern:
        """Read `N`, `[0,1,1]` or `([0]*1+[1]*15)`; `ValueError` says what is wrong with `text`."""
        _short(text)
        if " " in text or "'" in text or '"' in text:
            raise ValueError("has a space or a quote, which Megatron refuses; write it without")
        if re.fullmatch(r"[0-9]+", text):
            if not 1 <= int(text) <= MOST_LAYERS:
                raise ValueError(f"must be from 1 to {MOST_LAYERS:,}")
            return cls(text, int(text), ())
        tokens = _TOKEN.findall(text)
        if "".join(tokens) != text:
            raise ValueError("may only have digits and `[ ] ( ) + * ,`")
        if wrong := [token for token in tokens if token[0] == "0" and token != "0"]:
            raise ValueError(f"has the number `{wrong[0]}`, which Python does not read; write it without the zero")
        if text.count("(") > MOST_BRACKETS:
            raise ValueError(f"has more than {MOST_BRACKETS} `(`")
        value, rest = _sum(tokens)
        if rest:
            raise ValueError(f"cannot be read from `{''.join(rest)}` on")
        if isinstance(value, int):
            raise ValueError("is a number where a list such as `[0]*1+[1]*15` is meant")
        if others := [number for number in value if number not in (0, 1)]:
            raise ValueError(f"has the value {others[0]}; a layer is 0 (dense) or 1 (MoE)")
        return cls(text, None, tuple(value))

    def is_moe(self, num_layers: int) -> tuple[bool, ...]:
        """Whether each of `num_layers` layers is MoE. `# (layer)`"""
        if self.period is not None:
            return tuple(layer % self.period == 0 for layer in range(num_layers))
        return tuple(layer == 1 for layer in self.layers)

    def __str__(self) -> str:
        return self.text


_Value = int | list[int]


def _sum(tokens: list[str]) -> tuple[_Value, list[str]]:
    value, tokens = _product(tokens)
    while tokens and tokens[0] == "+":
        right, tokens = _product(tokens[1:])
        if isinstance(value, int) or isinstance(right, int):
            raise ValueError("adds a number, where only lists can be joined")
        value = _bounded(len(value) + len(right)) and value + right
    return value, tokens


def _product(tokens: list[str]) -> tuple[_Value, list[str]]:
    value, tokens = _atom(tokens)
    while tokens and tokens[0] == "*":
        right, tokens = _atom(tokens[1:])
        if isinstance(value, int):
            value, right = right, value
        if isinstance(value, int) or not isinstance(right, int):
            raise ValueError("multiplies two of a kind; `*` repeats a list a number of times")
        value = _bounded(len(value) * right) and value * right
    return value, tokens


def _atom(tokens: list[str]) -> tuple[_Value, list[str]]:
    if not tokens:
        raise ValueError("ends in the middle")
    first, rest = tokens[0], tokens[1:]
    if first == "(":
        value, rest = _sum(rest)
        if rest[:1] != [")"]:
            raise ValueError("has an unclosed `(`")
        return value, rest[1:]
    if first == "[":
        end = rest.index("]") if "]" in rest else -1
        if end < 0:
            raise ValueError("has an unclosed `[`")
        items = rest[:end]
        if not items or items[1::2] != [","] * len(items[1::2]) or not all(item.isdigit() for item in items[::2]):
            raise ValueError("has a list that is not numbers with commas between")
        return [int(item) for item in items[::2]], rest[end + 1 :]
    if first.isdigit():
        return int(first), rest
    raise ValueError(f"has `{first}` where a list or a number is meant")


def _short(text: str) -> None:
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"has {len(text):,} characters; at most {MOST_CHARACTERS:,} are possible")


def _bounded(length: int) -> bool:
    if not 1 <= length <= MOST_LAYERS:
        raise ValueError(f"expands to {length:,} layers; from 1 to {MOST_LAYERS:,} are possible")
    return True


@dataclass(frozen=True, slots=True)
class PipelineLayout:
    """Which layers each stage holds (megatron/core/transformer/pipeline_parallel_layer_layout.py:283 at 0.19.2)."""

    text: str
    stages: tuple[str, ...]
    """For each virtual stage in order, its layers as letters: `E` embedding, `t` transformer, `m` MTP, `L` loss."""

    @classmethod
    def parse(cls, text: str) -> PipelineLayout:
        """Read a layout such as `Et*3|(tt|)*29,m|L`; `ValueError` says what is wrong with `text`."""
        _short(text)
        if wrong := re.search(r"[^EtmL|,()*0-9]", text):
            raise ValueError(f"has `{wrong.group()}`; it may only have `E`, `t`, `m`, `L`, `|`, `,` and `( )*n`")
        expanded = _repeat(text.replace(",", ""), r"\(([^()]+)\)\*([0-9]+)")
        expanded = _repeat(expanded, r"([EtmL|])\*([0-9]+)")
        if wrong := re.search(r"[^EtmL|]", expanded):
            raise ValueError(
                f"has a `{wrong.group()}` out of place; `x*n` repeats a letter, `(..)*n` a group without inner groups"
            )
        stages = tuple(expanded.split("|"))
        if not (stages[0].startswith("E") and expanded.count("E") == 1):
            raise ValueError("must have one `E` (embedding), at its very beginning")
        if not (stages[-1].endswith("L") and expanded.count("L") == 1):
            raise ValueError("must have one `L` (loss), at its very end")
        if "m" in expanded and "t" in expanded[expanded.index("m") :]:
            raise ValueError("has a `t` behind an `m`; prediction depths come after all layers")
        if sum("m" in stage for stage in stages) > 1:
            raise ValueError("has `m` in more than one stage; all prediction depths are in one")
        return cls(text, stages)

    def count(self, letter: str) -> int:
        """How many layers of a kind there are in all."""
        return sum(stage.count(letter) for stage in self.stages)

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class HybridPattern:
    """What each layer of a hybrid stack is (megatron/core/models/hybrid/hybrid_layer_allocation.py:13 at 0.19.2)."""

    text: str
    stages: tuple[str, ...]
    """For each virtual stage in order, its layers as letters: `M` Mamba, `G` gated delta net, `*` attention, `+` latent
    attention, `D` sparse attention, `-` dense feed-forward, `E` experts. One stage: Megatron cuts it evenly."""
    depths: tuple[str, ...]
    """For each multi-token prediction depth, its layers."""

    @classmethod
    def parse(cls, text: str) -> HybridPattern:
        """Read `*E*E`, `*E|*E` (stages) or `*E*E/*E` (a prediction depth); `ValueError` says what is wrong."""
        _short(text)
        if wrong := re.search(r"[^MG*D+E|/-]", text):
            raise ValueError(f"has `{wrong.group()}`; a layer is `M`, `G`, `*`, `+`, `D`, `-` or `E`")
        main, *depths = text.split("/")
        if not main.replace("|", ""):
            raise ValueError("has no layer")
        if "" in depths or len(set(depths)) > 1 or any("|" in depth for depth in depths):
            raise ValueError("has prediction depths that are not alike: behind each `/` stand the same layers, no `|`")
        if "*" in text and re.search(r"[+D]", text):
            raise ValueError("has `*` beside `+` or `D`; a stack has one kind of attention")
        return cls(text, tuple(main.split("|")), tuple(depths))

    @property
    def layers(self) -> str:
        """The letters of all layers, prediction depths apart."""
        return "".join(self.stages)

    def __str__(self) -> str:
        return self.text


def _repeat(text: str, pattern: str) -> str:
    def repeated(match: re.Match[str]) -> str:
        times = int(match.group(2))
        _bounded(len(match.group(1)) * times)
        return match.group(1) * times

    expanded = re.sub(pattern, repeated, text)
    _bounded(len(expanded))
    return expanded
