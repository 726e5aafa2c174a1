"""What all sections of a recipe are: frozen, compared by value, made of keywords."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from typing import Any


class Section:
    """The methods of a frozen dataclass, written once.

    `@dataclass(frozen=True)` compiles them anew for every class, with a constructor of up to sixty parameters: a fifth
    of all that `moekit check` computes.
    """

    def __init__(self, **values: Any) -> None:
        if unknown := values.keys() - {field.name for field in fields(self)}:  # type: ignore[arg-type]
            raise TypeError(f"{type(self).__name__} has no field {', '.join(sorted(unknown))}")
        self.__dict__.update(values)

    def __setattr__(self, name: str, value: Any) -> None:
        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    def __delattr__(self, name: str) -> None:
        raise FrozenInstanceError(f"cannot delete field {name!r}")

    def _values(self) -> tuple[Any, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))  # type: ignore[arg-type]

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self._values() == other._values()

    def __hash__(self) -> int:
        return hash(self._values())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.__dict__.items())})"
