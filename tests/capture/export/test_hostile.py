"""Files that are damaged or made to do harm: a LoadError, and nothing of them runs."""

from __future__ import annotations

import copy
import functools
import hashlib
import io
import json
import struct
import zipfile

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moebius import LoadError, load
from moebius.errors import MoebiusError
from moebius.export import archive

SETTINGS = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}


def members_of(path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as file:
        return {name: file.read(name) for name in file.namelist()}


def pack(path, members: dict[str, bytes], seal: bool = True, compression: int = zipfile.ZIP_STORED):
    """A file with these members and, if sealed, right digests: what somebody who knows the format would write."""
    if seal:
        manifest = json.loads(members["manifest.json"])
        manifest["sha256"] = {
            n: hashlib.sha256(members[n]).hexdigest() for n in archive.MEMBERS if n in members
        }
        members = {**members, "manifest.json": json.dumps(manifest).encode()}
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, data in members.items():
            file.writestr(name, data)
    return path


def edited(path, name: str, change) -> dict[str, bytes]:
    members = members_of(path)
    value = json.loads(members[name])
    changed = change(value)
    members[name] = json.dumps(value if changed is None else changed).encode()
    return members


@pytest.fixture(scope="module")
def answer(forward_file):
    torch.manual_seed(0)
    x = torch.randn(5, 4)
    return x, load(forward_file)(x, 2.0)


@settings(max_examples=150, **SETTINGS)
@given(data=st.data())
def test_flipped_bytes(forward_file, tmp_path, answer, data):
    """Any damage: the file is refused, or it was in bytes that mean nothing and the step is the same."""
    content = bytearray(forward_file.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    same_step_or_refused(tmp_path / "flipped", bytes(content), answer)


@settings(max_examples=60, **SETTINGS)
@given(data=st.data())
def test_cut_and_spliced(forward_file, tmp_path, answer, data):
    content = forward_file.read_bytes()
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(content))] * 2)))
    middle = data.draw(st.sampled_from([b"", content[start:stop] * 2, b"\0" * (stop - start)]))
    same_step_or_refused(tmp_path / "cut", content[:start] + middle + content[stop:], answer)


def same_step_or_refused(path, content, answer):
    path.write_bytes(content)
    try:
        step = load(path)
    except LoadError as error:
        assert path.name in str(error)
        return
    x, expected = answer
    found = step(x, 2.0)
    assert torch.equal(found["y"], expected["y"]) and found["sizes"][0] == expected["sizes"][0]


# ----------------------------------------------------------------------------------------------------------------------
# Well-sealed files with other contents
# ----------------------------------------------------------------------------------------------------------------------

JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["", "x", "os.system", "node", "__import__", "state", "load", "torch.load", "a;b", "lambda: 0"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["node", "tuple", "call", "state", "op", "slice", "x"]), inner, max_size=2),
    max_leaves=6,
)  # fmt: skip


def paths(value, here=()):
    yield here
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from paths(inner, (*here, key))


@pytest.mark.parametrize("name", ["graph.json", "program.json", "guards.json", "state.json", "manifest.json"])
@settings(max_examples=80, **SETTINGS)
@given(data=st.data())
def test_json_of_another_shape(forward_file, tmp_path, answer, name, data):
    """Anything in place of any part: LoadError when loaded, or a step whose call gives a value or a torch error."""
    value = json.loads(members_of(forward_file)[name])
    where = data.draw(st.sampled_from(list(paths(value))))
    junk = data.draw(JUNK)
    if not where:
        changed = junk
    else:
        changed = owner = copy.deepcopy(value)
        for key in where[:-1]:
            owner = owner[key]
        if data.draw(st.booleans()):
            owner[where[-1]] = junk
        else:
            del owner[where[-1]]
    members = members_of(forward_file)
    members[name] = json.dumps(changed).encode()
    pack(tmp_path / "junk", members, seal=name != "manifest.json")
    try:
        step = load(tmp_path / "junk")
    except LoadError:
        return
    try:
        step(answer[0], 2.0)
    except (MoebiusError, TypeError, RuntimeError, ValueError, IndexError, KeyError, AttributeError):
        pass  # it is a program of allowed operators, and its own errors are its own


CALLED = []


@pytest.mark.parametrize(
    "node",
    [
        {"op": "call", "target": "os.system", "args": ["true"]},
        {"op": "call", "target": "builtins.eval", "args": ["1"]},
        {"op": "call", "target": "builtins.__import__", "args": ["os"]},
        {"op": "call", "target": "builtins.getattr", "args": [{"node": 0}, "__class__"]},
        {"op": "call", "target": "torch.load", "args": ["/etc/passwd"]},
        {"op": "call", "target": "torch.from_file", "args": ["/etc/passwd"]},
        {"op": "call", "target": "torch.hub.load", "args": ["x"]},
        {"op": "call", "target": "torch.ops.load_library", "args": ["x"]},
        {"op": "call", "target": "aten::from_file", "args": ["/etc/passwd"]},
        {"op": "call", "target": "operator.attrgetter", "args": ["__class__"]},
        {"op": "call", "target": "operator.methodcaller", "args": ["backward"]},
        {"op": "method", "target": "numpy", "args": [{"node": 0}]},
        {"op": "method", "target": "register_hook", "args": [{"node": 0}, None]},
        {"op": "method", "target": "apply_", "args": [{"node": 0}, None]},
        {"op": "method", "target": "data_ptr", "args": [{"node": 0}]},
        {"op": "method", "target": "__reduce_ex__", "args": [{"node": 0}, 2]},
        {"op": "method", "target": "add\n    import os", "args": [{"node": 0}]},
        {"op": "attribute", "target": "__class__", "args": [{"node": 0}]},
        {"op": "attribute", "target": "shape); import os", "args": [{"node": 0}]},
        {"op": "input", "name": "x): pass\nimport os #"},
        {"op": "input", "name": "ok"},
        {"op": "graph", "name": "forward"},
        {"op": "tensor", "name": "nothing"},
        {"op": "call", "target": "operator.add", "args": [{"node": 99}, 1]},
        {"op": "call", "target": "operator.add", "args": [{"node": -1}, 1]},
        {"op": "call", "target": "operator.add", "args": [{"node": True}, 1]},
        {"op": "call", "target": "operator.add", "args": [], "kwargs": {"a=0, b": 1}},
        {"op": "call", "target": "operator.add", "args": [], "also": 1},
        {"op": "call", "target": ["operator.add"], "args": []},
        {"op": "call", "target": "operator.add", "args": [{"dtype": "__class__"}]},
        {"op": "call", "target": "operator.add", "args": [{"object": "x"}]},
    ],
    ids=lambda node: f"{node['op']} {str(node.get('target', node.get('name')))[:24]!r}",
)
def test_nodes_that_are_not_allowed(forward_file, tmp_path, node):
    members = edited(forward_file, "graph.json", lambda graph: graph["nodes"].append(node))
    with pytest.raises(LoadError, match="hostile"):
        load(pack(tmp_path / "hostile", members))


@pytest.mark.parametrize(
    "relation",
    [
        {"shape": [9, 0]}, {"shape": [0]}, {"shape": ["0", 0]}, {"shape": [0, -1]}, {"stride": [0, 1 << 40]},
        {"attr": [0, "T"]}, {"number": 9}, {"all": 1}, {"any": [{"number": -1}]}, {"call": ["builtins.open", "x"]},
        {"call": ["math.__class__", 1]}, {"call": ["torch.load", "x"]}, {"number": 0, "call": ["operator.add", 1, 2]},
        functools.reduce(lambda inner, _: {"all": [inner]}, range(250), True), {"call": []}, {"call": [["math.sin"]]},
    ],
)  # fmt: skip
def test_relations_that_are_not_allowed(training_file, tmp_path, relation):
    def change(guards):
        sizes = next(g for g in guards if g["check"] == "sizes")
        sizes["relation"] = relation

    with pytest.raises(LoadError, match="hostile"):
        load(pack(tmp_path / "hostile", edited(training_file, "guards.json", change)))


def test_computations_that_are_not_allowed(training_file, tmp_path):
    for call in (["os.system", "true"], ["builtins.eval", "1"], ["torch.load", "x"], [], ["math.sin", {"number": 9}]):

        def change(guards, call=call):
            next(g for g in guards if g["check"] == "number")["formula"] = {"call": call}

        with pytest.raises(LoadError, match="hostile"):
            load(pack(tmp_path / "hostile", edited(training_file, "guards.json", change)))


def test_archives_of_other_makes(forward_file, tmp_path):
    members = members_of(forward_file)
    path = tmp_path / "hostile"
    cases = {
        "compressed": lambda: pack(path, members, compression=zipfile.ZIP_DEFLATED),
        "members are": lambda: pack(path, {**members, "../../evil.py": b"x"}),
        "its members": lambda: pack(path, {k: v for k, v in members.items() if k != "guards.json"}),
        "damaged": lambda: pack(path, {**members, "graph.py": b"import os"}, seal=False),
        "format": lambda: pack(path, edited(forward_file, "manifest.json", lambda m: m.update(format=3))),
        "not an exported step": lambda: path.write_bytes(b"PK\x03\x04" + b"\0" * 100),
        "no JSON": lambda: pack(path, {**members, "guards.json": b'[{"check": NaN}]'}),
        "twice": lambda: pack(path, {**members, "state.json": b'{"tensors": {}, "tensors": {}}'}),
        "guards.json": lambda: pack(path, {**members, "guards.json": b"[" * 100_000}),
        "tensors.safetensors": lambda: pack(path, {**members, "tensors.safetensors": b"\xff" * 8}),
    }
    for text, make in cases.items():
        make()
        with pytest.raises(LoadError, match=text):
            load(path)
    with pytest.raises(LoadError, match="No such file"):
        load(tmp_path / "nothing")
    with pytest.raises(LoadError):
        load(tmp_path)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_duplicate_members(forward_file, tmp_path):
    members = members_of(forward_file)
    with zipfile.ZipFile(tmp_path / "hostile", "w") as file:
        for name, data in (*members.items(), ("graph.json", members["graph.json"])):
            file.writestr(name, data)
    with pytest.raises(LoadError, match="members"):
        load(tmp_path / "hostile")


def test_a_bomb_is_not_unpacked(forward_file, tmp_path):
    members = members_of(forward_file)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name, data in members.items():
            kind = zipfile.ZIP_DEFLATED if name == "graph.json" else zipfile.ZIP_STORED
            file.writestr(zipfile.ZipInfo(name), b"[" * (1 << 24) if name == "graph.json" else data, kind)
    (tmp_path / "hostile").write_bytes(buffer.getvalue())
    with pytest.raises(LoadError, match="compressed"):
        load(tmp_path / "hostile")


def test_tensors_larger_than_the_file(forward_file, tmp_path):
    members = members_of(forward_file)
    length = struct.unpack("<Q", members["tensors.safetensors"][:8])[0]
    header = json.loads(members["tensors.safetensors"][8 : 8 + length])
    (name,) = [n for n in header if n != "__metadata__"]
    for change in (
        {"shape": [1 << 40, 1 << 20], "data_offsets": [0, 1 << 62]},
        {"shape": [1 << 40]},
        {"data_offsets": [-4, 44]},
        {"dtype": "F64"},
    ):
        text = json.dumps({name: {**header[name], **change}}).encode()
        data = struct.pack("<Q", len(text)) + text + members["tensors.safetensors"][8 + length :]
        with pytest.raises(LoadError, match="hostile"):
            load(pack(tmp_path / "hostile", {**members, "tensors.safetensors": data}))


def test_state_of_another_shape(forward_file, tmp_path):
    def described(state):
        return next(iter(state["tensors"].values()))

    for change in (
        lambda s: described(s).update(shape=[1 << 40]),
        lambda s: described(s).update(stride=[1 << 30, 1]),
        lambda s: described(s).update(stride=[0, 0]),
        lambda s: described(s).update(device="cuda:99"),
        lambda s: described(s).update(dtype="object"),
        lambda s: described(s).update(kind="Module"),
        lambda s: s["fixed"].append("nothing"),
        lambda s: s["gradients"].extend(s["tensors"]),
        lambda s: s["cells"].update(x={"tensor": "nothing"}),
        lambda s: s["cells"].update(x={"value": {"pickle": "x"}}),
        lambda s: s["tensors"].clear(),
    ):
        with pytest.raises(LoadError, match="hostile"):
            load(pack(tmp_path / "hostile", edited(forward_file, "state.json", change)))
