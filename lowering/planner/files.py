"""Files that the planner is given."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from moebius.lowering.planner.errors import PlannerError


def write_text(path: str | Path, text: str) -> None:
    """Raises PlannerError where the file cannot be written."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise PlannerError(f"{path} cannot be written: {error.strerror or error}") from None


def read_json(path: str | Path) -> Any:
    """What a JSON file holds. Raises PlannerError where it cannot be read."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise PlannerError(f"{path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise PlannerError(f"{path} is no JSON: {error}") from None
