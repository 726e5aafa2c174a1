"""The markers a recipe field carries, and how a field's name follows from Megatron's option."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Flag:
    """The Megatron option a field says.

    `true` prints a switch, `false` prints nothing; a list prints one word an element; null prints nothing.
    """

    option: str
    """Megatron's long option, as `--help` spells it first."""
    handbook: str = ""
    """The handbook section that teaches it; empty where it does not."""


@dataclass(frozen=True, slots=True)
class Owned:
    """A field that says options whose values (paths) the launch owns: see `moekit.launch.run_files.owned_arguments`."""

    options: tuple[str, ...]
    handbook: str = ""


@dataclass(frozen=True, slots=True)
class AtLeast:
    """The least value a number may have."""

    least: float


@dataclass(frozen=True, slots=True)
class FreeText:
    """Text for people: may have several lines, never reaches a command line."""


SAID_BY_SECTION = {
    "moe": r"^moe_",
    "router": r"^moe_(router_)?",
    "balance": r"^moe_(router_)?",
    "parallel": r"_parallel|_size$",
    "train": r"^train_",
    "optimizer": r"^optimizer_",
    "schedule": r"^lr_",
    "overlap": r"^overlap_",
    "checkpoint": r"ckpt_|_checkpoint$",
    "log": r"^log_|_log(?=_)|_logging$",
    "monitor": r"^save_|^moe_",
    "profile": r"^profile_",
}
"""What a section already says of an option's name, and its fields therefore leave out."""

EXCEPTIONS = {
    "balance.type": "`load_balancing` is what the section is called",
    "moe.dispatcher": "`token` and `type` add nothing",
    "optimizer.name": "the option is only `--optimizer`",
    "profile.enabled": "the option is only `--profile`",
}
"""Fields whose names do not follow from the option, each with its reason; at most 15."""


def field_name(section: str, option: str) -> str:
    """The name a field of `section` has for Megatron's `option`: snake case, less what the section already says."""
    name = option.removeprefix("--").replace("-", "_")
    return re.sub(SAID_BY_SECTION.get(section, r"(?!)"), "", name)
