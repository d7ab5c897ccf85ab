"""A gallery of training scripts in the structure of public ones, written anew, small: ``make trainers``."""

from . import (
    agents,
    arrays,
    capacities,
    counts,
    engines,
    language,
    loops,
    mixtures,
    optimizing,
    pictures,
    practised,
    pretraining,
    published,
    recommenders,
    registries,
    repositories,
    routers,
    runners,
    structures,
    unlisted,
)
from .script import SCRIPTS, Script

__all__ = [
    "SCRIPTS", "Script", "agents", "arrays", "capacities", "counts", "engines", "language", "loops", "mixtures",
    "optimizing",
    "pictures", "practised", "pretraining", "published", "recommenders", "registries", "repositories", "routers",
    "runners", "structures", "unlisted",
]  # fmt: skip
