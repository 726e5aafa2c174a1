"""Whether two runs can be compared at all: what each was made of and ran on, side by side."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from moekit.job.attempts import read_facts
from moekit.launch import provenance
from moekit.launch.provenance import DATA_FILES, TOKENIZER_FILES, folder_facts
from moekit.launch.rundir import RunDir, data_dir, tokenizer_dir
from moekit.problems import MoekitError
from moekit.recipe.load import Loaded, load_partly
from moekit.recipe.schema import Recipe
from moekit.watch.facts import Facts

Bearing = Literal["loss", "speed", "both"]
"""What cannot be compared, or only with care, where it differs."""


@dataclass(frozen=True)
class Side:
    """One of the two runs, as its files describe it."""

    run: RunDir
    name: str
    state: str
    """What the run is, in a sentence; empty where that is not known."""
    active: bool
    """Whether it may go on."""
    loaded: Loaded | None
    """Its recipe; None where this moekit cannot read it."""
    provenance: Mapping[str, Any] = field(default_factory=dict)
    software: Mapping[str, Any] = field(default_factory=dict)
    """Of its newest attempt that says it."""

    @property
    def recipe(self) -> Recipe | None:
        """The recipe's values."""
        return self.loaded.recipe if self.loaded else None

    def found(self, name: str) -> Any:
        """What the launch found on the cluster (`moekit/launch/provenance.py`); None where nothing was put down."""
        found = self.provenance.get("found")
        return found.get(name) if isinstance(found, dict) else None


@dataclass(frozen=True)
class Fact:
    """One thing that both should have in common."""

    name: str
    one: str
    other: str
    """As it is said; `not known`."""
    same: bool | None
    """None where it is not known of one of them."""
    bearing: Bearing


def side(run: RunDir, name: str, state: str, active: bool) -> Side:
    """Read what a run's files say of it."""
    try:
        loaded: Loaded | None = load_partly(str(run.recipe))
    except MoekitError:
        loaded = None
    return Side(run, name, state, active, loaded, provenance.read(run), _software(run))


def _software(run: RunDir) -> dict[str, Any]:
    for number in sorted(run.numbers(), reverse=True):
        try:
            said = json.loads(run.attempt(number).software.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(said, dict):
            return said
    return {}


def facts_between(one: Side, other: Side, known: tuple[Facts, Facts]) -> list[Fact]:
    """All that is held side by side; `known` is what Megatron's own arguments say."""
    tokens = [facts.tokens_a_step for facts in known]
    sides = (one, other)
    return [
        _fact("tokens a step", [None if t is None else (f"{t:,}", t) for t in tokens], "loss"),
        _fact("data", [_data(each) for each in sides], "loss"),
        _fact("tokenizer", [_tokenizer(each) for each in sides], "loss"),
        _fact("Megatron", [_megatron(each) for each in sides], "both"),
        _fact("torch", [_version(each, "torch") for each in sides], "both"),
        _fact("Transformer Engine", [_version(each, "transformer_engine") for each in sides], "both"),
        _fact("image", [_image(each) for each in sides], "both"),
        _fact("device", [_version(each, "device") for each in sides], "speed"),
        _fact("nodes x GPUs", [_world(each) for each in sides], "speed"),
    ]


def _fact(name: str, values: list[tuple[str, Any] | None], bearing: Bearing) -> Fact:
    """From (what is said, what is compared) of both."""
    one, other = values
    same = None if one is None or other is None else one[1] == other[1]
    return Fact(name, one[0] if one else "not known", other[0] if other else "not known", same, bearing)


def _data(each: Side) -> tuple[str, Any] | None:
    if each.recipe is None:
        return None
    if each.recipe.data.mock_data:
        return "made up", "mock"
    name = each.recipe.data.name
    if not name:
        return None
    return _folder(name, each.found("data"), data_dir(_root(each), name), DATA_FILES, "manifest")


def _tokenizer(each: Side) -> tuple[str, Any] | None:
    name = each.recipe.data.tokenizer if each.recipe else None
    if each.recipe and not name:
        return "none", ""
    if not name:
        return None
    return _folder(name, each.found("tokenizer"), tokenizer_dir(_root(each), name), TOKENIZER_FILES, "files")


def _folder(name: str, found: Any, folder: Path, files: tuple[str, ...], what: str) -> tuple[str, Any] | None:
    """By the hashes put down at the launch, or where there are none, by those of the files as they are now.

    A manifest says all of its data; lists of arguments name paths, which differ where the data do not.
    """
    then = found.get("sha256") if isinstance(found, dict) else None
    hashes = then or folder_facts(folder, files)["sha256"]
    if not hashes:
        return None
    told = hashes.get("manifest.json") or hashlib.sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest()
    return f"{name}, {what} {told[:8]}{'' if then else ' now'}", told


def _root(each: Side) -> Path:
    """The folder that holds `runs/`, `data/` and `tokenizers/`."""
    return each.run.path.resolve().parent.parent


def _megatron(each: Side) -> tuple[str, Any] | None:
    checkout = each.found("checkout") or {}
    version = each.software.get("megatron") or checkout.get("version") or each.provenance.get("megatron")
    commit = checkout.get("commit") or ""
    said = f"{version} at {commit[:10]}" if commit else f"{version}"
    return (said, (version, commit)) if version else None


def _version(each: Side, name: str) -> tuple[str, Any] | None:
    if name not in each.software:
        return None
    return str(each.software[name] or "none"), each.software[name]


def _image(each: Side) -> tuple[str, Any] | None:
    if not each.provenance:
        return None
    image = each.found("image")
    if not image:
        return "none", None
    if "name" in image:
        return str(image["name"]), image["name"]
    told = image.get("sha256") or [image.get("bytes"), image.get("modified")]
    by = f"sha256 {told[:8]}" if isinstance(told, str) else f"{image.get('bytes') or 0:,} bytes"
    return f"{Path(str(image.get('path'))).name}, {by}", told


def _world(each: Side) -> tuple[str, Any] | None:
    gpus = each.recipe.parallel.gpus if each.recipe else None
    if not gpus:
        return None
    said = read_facts(each.run.path)
    a_node = said.ranks_per_node if said.world > 1 else gpus
    nodes = -(-gpus // max(1, min(a_node, gpus)))
    what = "processes on the CPU" if each.recipe and each.recipe.runtime.device == "cpu" else "GPUs"
    return f"{nodes} x {gpus // nodes} {what}", (nodes, gpus, what)
