"""Rules on the optimizer and its state."""

from __future__ import annotations

from moekit.recipe.rules.violation import Rule

RULES: tuple[Rule, ...] = ()
