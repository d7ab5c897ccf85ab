"""What the README and the reference promise: every public name, its signature, its docstring, and its errors."""

from __future__ import annotations

import dataclasses
import inspect
import json

import pytest
import torch

import moebius
from moebius import capture, explain, stats
from moebius.cli import main
from moebius.interpreter import InterpreterError, interpret
from moebius.kernels import experts
from moebius.options import CaptureOptions, Options
from moebius.report.records import Recompile

SIGNATURES = {
    "capture": "(target=None, **options)",
    "explain": "(target, **options)",
    "stats": "(target)",
    "reset": "()",
    "disable": "(function)",
    "mark_dynamic": "(tensor, dim)",
    "load": "(path",
    "weigh_by_tokens": "(loss, tokens)",
}
ERRORS = [
    "ExportError", "GraphBreakError", "GuardError", "LoadError", "NotCapturableError", "OptionError",
    "StateChangedError",
]  # fmt: skip
RECORDS = {
    "graphs": ["gm", "file", "line", "cold_seconds"],
    "breaks": ["reason", "detail", "hint", "file", "line", "function", "instruction", "stack", "cost_us"],
    "guards": ["source", "check", "file", "line", "cost_ns"],
    "expert_regions": [
        "file", "line", "idiom", "num_experts", "top_k", "lowered", "refusal", "kernel", "saved_bytes",
    ],
}  # fmt: skip


def test_type_checkers_know_each_option():
    fields = {field.name: field.type for field in dataclasses.fields(Options)}
    assert {name: hint.__forward_arg__ for name, hint in CaptureOptions.__annotations__.items()} == fields


@pytest.mark.parametrize("name", SIGNATURES)
def test_functions_have_the_documented_signature_and_say_what_they_do(name):
    function = getattr(moebius, name)
    signature = inspect.signature(function)
    plain = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    text = str(signature.replace(parameters=plain, return_annotation=inspect.Signature.empty))
    assert text.startswith(SIGNATURES[name])
    assert len(inspect.getdoc(function) or "") > 20


def test_public_names_are_public_and_there():
    assert set(SIGNATURES) | set(ERRORS) | {"MoebiusError", "MoebiusWarning", "__version__"} == set(moebius.__all__)
    for name in moebius.__all__:
        assert hasattr(moebius, name) and (name == "__version__" or not name.startswith("_"))
        assert name in dir(moebius)
    with pytest.raises(AttributeError, match="no attribute 'captures'"):
        moebius.captures  # noqa: B018


@pytest.mark.parametrize("name", ERRORS)
def test_errors_have_one_base_and_a_docstring(name):
    error = getattr(moebius, name)
    assert issubclass(error, moebius.MoebiusError) and inspect.getdoc(error)


def test_options_are_the_documented_ones_with_their_defaults():
    defaults = {f.name: f.default for f in dataclasses.fields(Options)}
    documented = {"backend": "moebius", "fullgraph": False, "dynamic": None, "mesh": None, "plan": "auto"}
    assert defaults.items() >= (documented | {"precision": None, "verify": 0}).items()
    for name in defaults:
        assert name in (Options.__doc__ or ""), f"{name} is not in the docstring"


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: capture(3), moebius.NotCapturableError, "needs a function"),
        (lambda: capture(len), moebius.NotCapturableError, "written in C"),
        (lambda: capture(dict), moebius.NotCapturableError, "capture an instance"),
        (lambda: capture(capture(lambda x: x)), moebius.NotCapturableError, "captured already"),
        (lambda: capture(lambda x: x, fullgraf=True), moebius.OptionError, "no option 'fullgraf'"),
        (lambda: capture(lambda x: x, backend="no such"), moebius.OptionError, "no such"),
        (lambda: capture(lambda x: x, dynamic="yes"), moebius.OptionError, "dynamic='yes'"),
        (lambda: capture(lambda x: x, precision="fp4"), moebius.OptionError, "fp4"),
        (lambda: capture(lambda x: x, verify=-1), moebius.OptionError, "verify=-1"),
        (lambda: explain(capture(lambda x: x), backend="eager"), moebius.OptionError, "takes no options"),
        (lambda: stats(len), moebius.NotCapturableError, "not something that capture returned"),
        (lambda: moebius.disable(3), moebius.NotCapturableError, "callable"),
        (lambda: moebius.mark_dynamic(torch.ones(2), 1), moebius.OptionError, "no dimension 1"),
        (lambda: moebius.load("/no/such/file"), moebius.LoadError, "/no/such/file"),
        (lambda: capture(lambda x: x).export("step.moebius"), moebius.ExportError, ""),
    ],
)
def test_wrong_use_is_an_error_that_says_what_is_wrong(call, error, says):
    with pytest.raises(error) as caught:
        call()
    assert says in str(caught.value) and len(str(caught.value)) > 15


def moe(x, router, gate_up, down):
    weight, chosen = (x @ router.T).softmax(-1).topk(2)
    mask = torch.nn.functional.one_hot(chosen, len(router)).permute(2, 1, 0)
    out = torch.zeros_like(x)
    for expert in mask.sum((1, 2)).nonzero()[:, 0]:
        slot, token = torch.where(mask[expert])
        gate, up = (x[token] @ gate_up[expert].T).chunk(2, -1)
        out.index_add_(0, token, (torch.nn.functional.silu(gate) * up) @ down[expert].T * weight[token, slot, None])
    torch._dynamo.graph_break()
    return out.sum().item()


def test_a_report_has_everything_that_is_promised(tmp_path):
    shapes = [(12, 8), (4, 8), (4, 12, 8), (4, 8, 6)]
    report = explain(moe, backend="eager")(*(torch.randn(shape) for shape in shapes))
    assert isinstance(report.result, float)
    for part, names in RECORDS.items():
        for record in getattr(report, part):
            for name in names:
                assert hasattr(record, name), f"{part}: {name}"
    assert isinstance(report.graphs[0].gm, torch.fx.GraphModule) and report.guards
    assert {"captured", "opaque", "native"} <= set(report.coverage)
    assert "moe" in str(report)
    assert json.loads(report.to_json())["graphs"]
    report.to_html(tmp_path / "report.html")
    assert "<html" in (tmp_path / "report.html").read_text()


def test_statistics_have_everything_that_is_promised():
    step = capture(lambda x, n: x * n)
    for n in (2, 3, 3):
        step(torch.ones(1), n)
    seen = stats(step)
    for name in ("entries", "hits", "misses", "graphs", "breaks", "cold_seconds"):
        assert isinstance(getattr(seen, name), int | float), name
    assert all(isinstance(r, Recompile) for r in seen.recompiles) and len(seen.recompiles) == 1
    for name in ("guard", "old", "new", "file", "line"):
        assert getattr(seen.recompiles[0], name), name


def test_the_operator_stands_alone():
    names = list(inspect.signature(experts).parameters)
    assert names[:1] + names[2:6] == ["x_TD", "down_EDN", "index_TK", "weight_TK", "activation"]
    assert names[1].startswith("gate_up_E")
    assert inspect.signature(experts).parameters["activation"].default == "silu"
    x, up, down = torch.randn(5, 4), torch.randn(3, 12, 4), torch.randn(3, 4, 6)
    assert experts(x, up, down, torch.randint(3, (5, 2)), torch.rand(5, 2)).shape == (5, 4)


def test_the_interpreter_is_plain_python_or_an_error():
    assert interpret(lambda a, *, b: [a, b] * 2)(1, b=2) == [1, 2, 1, 2]
    with pytest.raises(ZeroDivisionError):
        interpret(lambda: 1 / 0)()
    assert issubclass(InterpreterError, Exception) and inspect.getdoc(InterpreterError)


@pytest.mark.parametrize("command", ["explain", "doctor", "bench"])
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as leaving:
        main([command, "--help"])
    assert leaving.value.code == 0 and "usage: moebius " + command in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nonsense"], "invalid choice"),
        (["doctor", "--nonsense"], "unrecognized arguments"),
        (["explain", "folder/missing.py"], "no file folder/missing.py"),
        (["explain", "--html"], "--html needs the name of a file"),
        (["bench", "nonsense"], "no benchmark 'nonsense'"),
        (["bench", "--plot"], ""),
    ],
)
def test_wrong_commands_exit_with_two_and_say_why(words, says, capsys):
    if words == ["bench", "--plot"]:
        assert main(words) == 0  # lists what there is
        return
    try:
        status = main(words)
    except SystemExit as leaving:
        status = leaving.code
    assert status == 2 and says in capsys.readouterr().err


def test_a_report_that_cannot_be_written_is_said_before_the_script_runs(tmp_path, capsys):
    script = tmp_path / "script.py"
    script.write_text("print('ran')\n")
    for option in ("--html", "--json"):
        assert main(["explain", option, str(tmp_path / "no" / "r"), str(script)]) == 2
        printed = capsys.readouterr()
        assert "no folder" in printed.err and "ran" not in printed.out
