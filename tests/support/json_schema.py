"""The part of JSON Schema that the report's schema is written in, as a check."""

from __future__ import annotations

import re
from typing import Any

TYPES = {"string": str, "object": dict, "array": list, "boolean": bool, "null": type(None)}
KNOWN = {
    "$schema", "title", "type", "const", "enum", "anyOf", "pattern", "properties", "required", "additionalProperties",
    "items", "prefixItems", "minItems", "maxItems",
}  # fmt: skip


def faults(value: Any, schema: dict[str, Any], where: str = "$") -> list[str]:
    """What of the value the schema does not allow."""
    assert set(schema) <= KNOWN, f"{where}: the check knows no {set(schema) - KNOWN}"
    found = []
    kind = schema.get("type")
    if kind in ("number", "integer"):
        wanted = int if kind == "integer" else (int, float)
        if not isinstance(value, wanted) or isinstance(value, bool):
            return [f"{where}: no {kind}"]
    elif kind is not None and not isinstance(value, TYPES[kind]):
        return [f"{where}: no {kind}"]
    if "const" in schema and value != schema["const"] or "enum" in schema and value not in schema["enum"]:
        found.append(f"{where}: {value!r:.40}")
    if "anyOf" in schema and all(faults(value, one, where) for one in schema["anyOf"]):
        found.append(f"{where}: none of the forms")
    if "pattern" in schema and not re.search(schema["pattern"], value):
        found.append(f"{where}: {value!r:.40} is not like {schema['pattern']}")
    if isinstance(value, dict):
        properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        found += [f"{where}: {key} is missing" for key in schema.get("required", ()) if key not in value]
        for key, item in value.items():
            if key in properties:
                found += faults(item, properties[key], f"{where}.{key}")
            elif others is False:
                found.append(f"{where}: {key} is one too many")
            elif isinstance(others, dict):
                found += faults(item, others, f"{where}.{key}")
    if isinstance(value, list):
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
            found.append(f"{where}: {len(value)} items")
        first = schema.get("prefixItems", [])
        for index, item in enumerate(value):
            one = first[index] if index < len(first) else schema.get("items")
            found += faults(item, one, f"{where}[{index}]") if one is not None else []
    return found
