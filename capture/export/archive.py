"""The file: a zip of stored members, one of each name, each with its digest in the manifest.

Reading trusts nothing. Members are never extracted to disk and never decompressed (they are stored), so neither a path
nor a bomb can do harm; sizes are bounded by the file's own; JSON with repeated keys is refused. ``graph.py`` is for
people: it is written and never read.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import zipfile
from collections.abc import Callable
from typing import Any

from ..errors import LoadError

FORMAT = 2
MANIFEST = "manifest.json"
MEMBERS = ("graph.json", "program.json", "guards.json", "state.json", "tensors.safetensors", "graph.py")
MAX_JSON = 256 << 20  # bytes of one JSON member
EPOCH = (1980, 1, 1, 0, 0, 0)  # zip's first date: the same step gives the same file


def write_archive(path: str | os.PathLike, about: dict[str, Any], members: dict[str, bytes]) -> None:
    """Write all members and the manifest. The file appears whole or not at all."""
    assert set(members) == set(MEMBERS)
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in members.items()}
    manifest = {"format": FORMAT, **about, "sha256": digests}
    target = os.fspath(path)
    partial = f"{target}.{os.getpid()}.partial"
    try:
        with zipfile.ZipFile(partial, "w", zipfile.ZIP_STORED) as archive:
            for name, data in {MANIFEST: to_json(manifest), **members}.items():
                archive.writestr(zipfile.ZipInfo(name, EPOCH), data)
        os.replace(partial, target)
    finally:
        if os.path.exists(partial):
            os.unlink(partial)


def read_archive(path: str | os.PathLike) -> tuple[dict[str, Any], dict[str, bytes]]:
    """(manifest, members). Raises LoadError for whatever is not exactly what ``write_archive`` writes."""
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError as error:
        raise LoadError(f"{os.fspath(path)}: {error.strerror or error}") from None
    try:
        members = read_members(data)
        manifest = from_json(members.pop(MANIFEST), MANIFEST)
        check_manifest(manifest, members)
    except LoadError as error:
        raise LoadError(f"{os.fspath(path)} is not a sound exported step: {error}") from None
    except Exception as error:  # zipfile raises many kinds for bytes that are no zip
        raise LoadError(f"{os.fspath(path)} is not an exported step: {type(error).__name__}: {error}") from None
    return manifest, members


def read_members(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = archive.infolist()
        names = [entry.filename for entry in entries]
        if sorted(names) != sorted((MANIFEST, *MEMBERS)):
            raise LoadError(f"its members are {', '.join(map(repr, names[:12]))}")
        for entry in entries:
            if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
                raise LoadError(f"{entry.filename} is compressed; members are stored as they are")
            if entry.flag_bits & 1:
                raise LoadError(f"{entry.filename} is encrypted")
        if sum(entry.file_size for entry in entries) > len(data):
            raise LoadError("its members overlap")
        return {entry.filename: archive.read(entry) for entry in entries}


def check_manifest(manifest: Any, members: dict[str, bytes]) -> None:
    need(isinstance(manifest, dict), "the manifest is no object")
    if manifest.get("format") != FORMAT:
        raise LoadError(f"its format is {manifest.get('format')!r:.40}, this moebius reads format {FORMAT}")
    digests = manifest.get("sha256")
    need(isinstance(digests, dict) and set(digests) == set(MEMBERS), "the manifest lists other members")
    for name, data in members.items():
        if hashlib.sha256(data).hexdigest() != digests[name]:
            raise LoadError(f"{name} is damaged: its digest is not the manifest's")


# ----------------------------------------------------------------------------------------------------------------------
# JSON
# ----------------------------------------------------------------------------------------------------------------------


def to_json(value: Any) -> bytes:
    """Strict JSON: no NaN, no Infinity."""
    return json.dumps(value, indent=1, ensure_ascii=True, allow_nan=False).encode()


def from_json(data: bytes, name: str) -> Any:
    """Parse one member. Raises LoadError."""
    need(len(data) <= MAX_JSON, f"{name} has {len(data)} bytes")
    try:
        return json.loads(data.decode("ascii"), object_pairs_hook=object_once, parse_constant=no_constant)
    except LoadError:
        raise
    except (ValueError, RecursionError) as error:
        raise LoadError(f"{name} is no JSON of ours: {error}") from None


def object_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    need(len(found) == len(pairs), "an object has a key twice")
    return found


def no_constant(text: str) -> Any:
    raise LoadError(f"{text} is no JSON")


# ----------------------------------------------------------------------------------------------------------------------
# The shape of JSON
# ----------------------------------------------------------------------------------------------------------------------


def need(condition: object, text: str) -> None:
    """LoadError with this text unless the condition holds."""
    if not condition:
        raise LoadError(text)


def fields(value: Any, what: str, required: dict[str, type | tuple[type, ...]], /, **optional: Any) -> dict[str, Any]:
    """An object with exactly these fields, each of its exact type; optional ones come with a default's type."""
    need(isinstance(value, dict), f"{what} is no object")
    unknown = set(value) - set(required) - set(optional)
    need(not unknown, f"{what} has unknown fields {sorted(unknown)[:4]}")
    for name, kind in required.items():
        need(name in value, f"{what} has no {name!r}")
        kinds = kind if isinstance(kind, tuple) else (kind,)
        need(type(value[name]) in kinds, f"{what}: {name!r} is a {type(value[name]).__name__}")
    return {**optional, **value}


def each(value: Any, what: str, read: Callable[[Any], Any]) -> list[Any]:
    """A JSON list, item by item."""
    need(isinstance(value, list), f"{what} is no list")
    return [read(item) for item in value]


def index(value: Any, limit: int, what: str) -> int:
    """A whole number in [0, limit)."""
    need(type(value) is int and 0 <= value < limit, f"{what} is {value!r:.40}, not a number below {limit}")
    return value
