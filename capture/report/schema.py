"""The published form of a report's JSON. A new key is a new minor version, one that changes or goes a major one."""

from __future__ import annotations

from typing import Any

VERSION = "1.9"
TEXT, NUMBER, WHOLE, YES = {"type": "string"}, {"type": "number"}, {"type": "integer"}, {"type": "boolean"}


def record(**properties: Any) -> dict[str, Any]:
    """An object with exactly these keys."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def many(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


def maybe(kind: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [kind, {"type": "null"}]}


COUNTS = {"captured": WHOLE, "opaque": WHOLE, "native": WHOLE}
TIMES = {"type": "object", "additionalProperties": NUMBER}
PLACE = {"file": TEXT, "line": WHOLE}
EXCERPT = record(**PLACE, text=TEXT, begin=WHOLE, end=WHOLE)
EDIT = record(line=WHOLE, before=many(TEXT), after=many(TEXT), top=TEXT, top_line=WHOLE)
SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "A moebius report",
    **record(
        schema={"const": VERSION},
        name=TEXT,
        **PLACE,
        status={"enum": ["hit", "captured", "recaptured", "native"]},
        why=TEXT,
        raised=TEXT,
        calls=maybe(record(hits=WHOLE, all=WHOLE, graphs=WHOLE)),
        verdict=TEXT,
        cold_seconds=NUMBER,
        seconds=TIMES,
        step_seconds=maybe(NUMBER),
        coverage=record(**COUNTS),
        counting_stopped=YES,
        in_loops=WHOLE,
        functions=many(record(**PLACE, name=TEXT, **COUNTS, in_loops=WHOLE)),
        graphs=many(
            record(
                name=TEXT, **PLACE, cold_seconds=NUMBER, times=TIMES, operations=WHOLE, inputs=WHOLE, code=TEXT,
                fault=maybe(TEXT),
            )
        ),
        breaks=many(
            record(
                code={"type": "string", "pattern": "^MB[0-9]{3}$"},
                change=TEXT, edit=maybe(EDIT), reason=TEXT, detail=TEXT, hint=TEXT, **PLACE,
                function=TEXT, instruction=TEXT, cost_us=maybe(NUMBER), excerpt=maybe(EXCERPT), origins=many(TEXT),
                stack=many({"type": "array", "prefixItems": [TEXT, WHOLE, TEXT], "minItems": 3, "maxItems": 3}),
            )
        ),
        guards=many(record(source=TEXT, check=TEXT, owner=TEXT, **PLACE, cost_ns=maybe(NUMBER))),
        expert_regions=many(
            {"type": "object", "required": [
                "file", "line", "idiom", "lowered", "refusal", "kernel", "excerpt", "blocking", "proof",
                "saved_bytes", "loop_saved_bytes"]}
        ),
        sync_points=many(record(why=TEXT, operator=TEXT, **PLACE, function=TEXT, excerpt=maybe(EXCERPT))),
        cuda_graph=TEXT,
        recompiles=many(record(guard=TEXT, old=TEXT, new=TEXT, **PLACE, hint=TEXT, entries=many(TEXT), call=WHOLE)),
        lines={
            "type": "object",
            "additionalProperties": {
                "type": "object", "additionalProperties": {"enum": ["captured", "opaque", "native", "break"]},
            },
        },
    ),
}  # fmt: skip
