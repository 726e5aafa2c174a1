"""The 42 symptoms of the handbook's index (A.2) as data, `symptoms.yaml`; and which of them a person's words name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

Label = Literal["slow", "OOM", "blows up", "learns badly", "won't start"]
_COMMON = frozenset(
    re.findall(
        r"\w+",
        "a an and are as at be but by can do does for from get gets go goes has have in is it its more much my no not"
        " of on or our out run runs so still than that the their there they this to up us very was we when where which"
        " while why with",
    )
)
"""Words that name nothing."""
_ALIKE = {"maxvio": "uneven", "unbalanced": "uneven", "imbalance": "uneven", "imbalanced": "uneven", "a2a": "alltoall"}
_ALIKE |= {"diverge": "diverges", "collapsed": "collapses", "spike": "spikes", "mem": "memory", "crash": "refused"}
_ALIKE |= {
    "slower": "slow",
    "experts": "expert",
    "aux": "auxiliary",
    "layers": "layer",
    "steps": "step",
    "grad": "gradient",
}


@dataclass(frozen=True)
class Remedy:
    """A change to a recipe, and why."""

    why: str
    change: Mapping[str, Any]
    """Sections and fields, as a recipe that inherits from `base` says them."""
    base: str = "first_moe"
    profile: str = ""
    """The cluster profile it is for; empty where any does."""


@dataclass(frozen=True)
class Symptom:
    """One row of the index."""

    key: str
    labels: tuple[Label, ...]
    """How the run fails."""
    signal: str
    """What moves first."""
    section: str
    """The handbook's, where it is explained."""
    needs: str
    """What would show it."""
    get: str
    """Where that comes from."""
    remedies: tuple[Remedy, ...]
    test: str = ""
    """The function of `judges/` that looks for it in a run's files; empty where files alone cannot show it."""
    advice: str = ""
    """What to do where no recipe helps."""


@cache
def symptoms() -> dict[str, Symptom]:
    """All of them by key, in the handbook's order."""
    text = (Path(__file__).parent / "symptoms.yaml").read_text(encoding="utf-8")
    found = {}
    for key, said in yaml.load(text, Loader=yaml.CSafeLoader).items():
        remedies = tuple(Remedy(**one) for one in said.pop("remedies"))
        found[key] = Symptom(key, labels=tuple(said.pop("labels")), remedies=remedies, **said)
    return found


def nearest(words: str, most: int = 3) -> list[Symptom]:
    """The symptoms that share most words with a person's, rare words counting more; those nearest first."""
    asked = _words(words)
    if words in symptoms():
        return [symptoms()[words]]
    texts = {
        key: _words(f"{key.replace('_', ' ')} {' '.join(one.labels)} {one.signal}") for key, one in symptoms().items()
    }
    often = {word: sum(word in text for text in texts.values()) for word in asked}
    scores = {key: sum(1 / often[word] for word in asked & text) for key, text in texts.items()}
    best = sorted((key for key in scores if scores[key] > 0), key=lambda key: -scores[key])
    return [symptoms()[key] for key in best[:most] if scores[key] >= scores[best[0]] / 2]


def _words(text: str) -> set[str]:
    text = (
        text.lower().replace("all-to-all", "alltoall").replace("all to all", "alltoall").replace("out of memory", "oom")
    )
    found = re.findall(r"[a-z0-9]+", text)
    return {_ALIKE.get(word, word) for word in found} - _COMMON
