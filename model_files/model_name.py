"""Names of a model: own, from its files, and served, from --served-model-name; checks that models' names differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.protocol.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ModelName:
    """Names of a model.

    own: derived from its files (`ModelSource.name`). served: names for clients; if empty, `own` is the only one."""

    own: str
    served: tuple[str, ...] = ()

    @property
    def all(self) -> tuple[str, ...]:
        """All names by which clients may call the model."""
        return self.served or (self.own,)

    @property
    def first(self) -> str:
        """Return the name used in answers."""
        return self.all[0]

    def shares(self, other: ModelName) -> bool:
        """Return whether the two have a client-visible name in common."""
        return not set(self.all).isdisjoint(other.all)

    def resembles(self, other: ModelName) -> bool:
        """Return whether both have the same own name, and not each served names of its own."""
        return self.own == other.own and not (self.served and other.served)


def split_names(given: Sequence[str], models: int) -> list[tuple[str, ...]]:
    """Return the served names of each model from the values of --served-model-name; empty tuples without any.

    Each value names one model, in order, with commas between its names. With a single model all values are its names.
    Raises ConfigError."""
    if not given:
        return [()] * models
    if models == 1:
        given = [",".join(given)]
    if len(given) != models:
        raise ConfigError(
            f"there are {models} models and {len(given)} values of --served-model-name; give one value for each "
            "model, with commas between its names",
            param="served_model_name",
        )
    names = [tuple(dict.fromkeys(filter(None, map(str.strip, value.split(","))))) for value in given]
    if not all(names):
        raise ConfigError("a --served-model-name is empty", param="served_model_name")
    return names


def require_distinct(names: Sequence[ModelName]) -> None:
    """Raise ConfigError if two models have a name in common."""
    counts = Counter(name for model in names for name in model.all)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise ConfigError(
            f"two models have the name {twice[0]!r}; give each its own --served-model-name",
            param="served_model_name",
        )
