"""Further kinds of state (see ``kinds``): torch's switches, tensors, modules and optimizers."""

from __future__ import annotations

from .kinds import TENSORS, Kind

# fmt: off
KINDS: dict[str, Kind] = {
    "default device": Kind(
        "torch.set_default_device('cpu')",
        "(2.0 if torch.get_default_device().type == 'meta' else 3.0)",
        "torch.set_default_device('meta' if $ == 3 else 'cpu')",
        "",
        "torch.set_default_device(None)",
    ),
    "anomaly": Kind(
        "torch.autograd.set_detect_anomaly(False)",
        "(2.0 if torch.is_anomaly_enabled() else 3.0)",
        "torch.autograd.set_detect_anomaly($ == 3)",
        "",
        "torch.autograd.set_detect_anomaly(False)",
    ),
    "multithreading": Kind(
        "torch.autograd.set_multithreading_enabled(True)",
        "(2.0 if torch._C._is_multithreading_enabled() else 3.0)",
        "torch._C._set_multithreading_enabled($ == 3)",
        "",
        "torch._C._set_multithreading_enabled(True)",
    ),
    "autocast dtype": Kind(
        "torch.set_autocast_dtype('cpu', torch.bfloat16)",
        "(2.0 if torch.get_autocast_dtype('cpu') is torch.float16 else 3.0)",
        "torch.set_autocast_dtype('cpu', torch.float16 if $ == 3 else torch.bfloat16)",
        "",
        "torch.set_autocast_dtype('cpu', torch.bfloat16)",
    ),
    "autocast cache": Kind(
        "torch.set_autocast_cache_enabled(True)",
        "(2.0 if torch.is_autocast_cache_enabled() else 3.0)",
        "torch.set_autocast_cache_enabled($ == 3)",
        "",
        "torch.set_autocast_cache_enabled(True)",
    ),
    "mkldnn": Kind(
        "setattr(torch.backends.mkldnn, 'enabled', True)",
        "(2.0 if torch.backends.mkldnn.enabled else 3.0)",
        "torch.backends.mkldnn.enabled = $ == 3",
        "",
        "torch.backends.mkldnn.enabled = True",
    ),
    "fill uninitialized": Kind(
        "None",
        "(2.0 if torch.utils.deterministic.fill_uninitialized_memory else 3.0)",
        "torch.utils.deterministic.fill_uninitialized_memory = $ == 3",
        "",
        "torch.utils.deterministic.fill_uninitialized_memory = True",
    ),
    "print options": Kind(
        "torch.set_printoptions(precision=$)",
        "torch._tensor_str.PRINT_OPTS.precision",
        "torch.set_printoptions(precision=$)",
        "",
        "torch.set_printoptions(profile='default')",
    ),
    "rng state": Kind("torch.manual_seed($) and None", "torch.rand(())", "torch.set_rng_state(STATES[$])", """
STATES = {}
for n in (2, 3, 5, 7):
    torch.manual_seed(n)
    STATES[n] = torch.get_rng_state()
"""),
    "parameter's copy": Kind("parameter($)", "copy.deepcopy(@).detach()", "@.data.fill_($)", TENSORS + "import copy\n"),
    "conjugate": Kind("[torch.ones(2) * 1j]", "(2.0 if @[0].is_conj() else 3.0)", "@[0] = @[0].conj()"),
    "negative": Kind("[torch.ones(2)]", "(2.0 if @[0].is_neg() else 3.0)", "@[0] = (torch.ones(2) * 1j).conj().imag"),
    "initial_seed": Kind("torch.manual_seed($) and None", "torch.initial_seed()", "torch.manual_seed($)"),
    "Generator seed": Kind("torch.Generator().manual_seed($)", "@.initial_seed()", "@.manual_seed($)"),
    "Generator state": Kind(
        "torch.Generator().manual_seed($)",
        "torch.rand((), generator=@)",
        "@.set_state(torch.Generator().manual_seed($).get_state())",
    ),
    "dropout state": Kind(
        "torch.manual_seed($) and None",
        "torch.nn.functional.dropout(torch.ones(3), 0.5).sum() + 1",
        "torch.manual_seed($)",
    ),
    "tensor item": Kind("torch.tensor([$, 1])", "int(@[0])", "@[0] = $"),
    "tensor tolist": Kind("torch.tensor([$, 1])", "sum(@.tolist())", "@[0] = $"),
    "tensor bool": Kind("torch.tensor([0])", "(2.0 if bool(@) else 3.0)", "@.fill_($ == 3)"),
    "tensor view": Kind("viewed($)", "@.b[0]", "@.a.fill_($)", """
def viewed(v):
    a = torch.full((2,), float(v))
    return types.SimpleNamespace(a=a, b=a[:1])
"""),
    "tensor base": Kind("viewed($)", "@.a[0]", "@.b.fill_($)", """
def viewed(v):
    a = torch.full((2,), float(v))
    return types.SimpleNamespace(a=a, b=a[:1])
"""),
    "tensor set_": Kind("torch.full((), float($))", "@", "@.set_(torch.full((), float($)))"),
    "tensor transposed": Kind("torch.ones(2, 3)", "@.shape[0]", "@.t_()"),
    "tensor strides": Kind("torch.ones(2, 2)", "@.stride()[0]", "@.t_()"),
    "contiguous": Kind("torch.ones(2, 2)", "(2.0 if @.is_contiguous() else 3.0)", "@.t_()"),
    "data dtype": Kind(
        "parameter($)",
        "@.detach().double().item() + (@.dtype is torch.float64)",
        "@.data = torch.full((), float($), dtype=torch.float64 if $ == 3 else torch.float32)",
        TENSORS,
    ),
    "data size": Kind("torch.ones($)", "@.shape[0]", "@.data = torch.ones($)"),
    "detach_": Kind("(torch.ones((), requires_grad=True) * 2)", "(2.0 if @.requires_grad else 3.0)", "@.detach_()"),
    "grad_fn": Kind(
        "torch.ones(())",
        "(2.0 if @.grad_fn is None else 3.0)",
        "@.mul_(torch.ones((), requires_grad=True))",
    ),
    "retain_grad": Kind(
        "(torch.ones((), requires_grad=True) * 2)",
        "(2.0 if @.retains_grad else 3.0)",
        "@.retain_grad()",
    ),
    "grad zeroed": Kind("graded($)", "(7 if @.grad is None else @.grad)", "@.grad.fill_($)", TENSORS + """
def graded(v):
    p = parameter(1)
    p.grad = torch.full((), float(v))
    return p
"""),
    "tensor hook": Kind(
        "hookt($)",
        "len(@._backward_hooks or ()) + 1",
        "@.register_hook(lambda g: g * $)",
        TENSORS + """
def hookt(v):
    p = parameter(1)
    p.register_hook(lambda g: g * v)
    return p
""",
    ),
    "tensor attribute deleted": Kind(
        "with_attribute(torch.ones(()), $)",
        "getattr(@, 'v', 1)",
        """if hasattr(@, 'v'): del @.v
if $ != 3:
    @.v = $""",
        TENSORS,
    ),
    "tensor subclass attribute": Kind("sub($)", "@.v", "@.v = $", TENSORS + """
class Sub(torch.Tensor): pass
def sub(v):
    t = torch.ones(()).as_subclass(Sub)
    t.v = v
    return t
"""),
    "sparse": Kind("torch.ones(2).to_sparse()", "@.values()[0]", "@.values().fill_($)"),
    "untyped storage": Kind(
        "torch.full((1,), float($))",
        "@[0]",
        "@.untyped_storage().copy_(torch.full((1,), float($)).untyped_storage())",
    ),
    "data_ptr": Kind(
        "[torch.full((1,), float($))]",
        "(2.0 if @[0].data_ptr() == 0 else 3.0)",
        "@[0] = torch.full((1,), float($))",
    ),
    "_modules": Kind("layer_of(child=layer_of(v=$))", "@.child.v", "@._modules['child'] = layer_of(v=$)", TENSORS),
    "_parameters": Kind("layer_of(w=parameter($))", "@.w.detach()", "@._parameters['w'] = parameter($)", TENSORS),
    "ModuleDict": Kind("torch.nn.ModuleDict({'a': layer_of(v=$)})", "@['a'].v", "@['a'] = layer_of(v=$)", TENSORS),
    "ParameterList": Kind("torch.nn.ParameterList([parameter($)])", "@[0].detach()", "@[0] = parameter($)", TENSORS),
    "ParameterDict": Kind(
        "torch.nn.ParameterDict({'a': parameter($)})",
        "@['a'].detach()",
        "@['a'] = parameter($)",
        TENSORS,
    ),
    "Sequential item": Kind("torch.nn.Sequential(hooked($))", "@(torch.ones(()))", "@[0] = hooked($)", TENSORS),
    "add_module": Kind("torch.nn.Sequential()", "len(@) + 1", "@.add_module('m$', torch.nn.Identity())", TENSORS),
    "delattr module": Kind("layer_of(v=$)", "getattr(@, 'v', 1)", """if hasattr(@, 'v'): del @.v
if $ != 3:
    @.v = $""", TENSORS),
    "named_parameters": Kind(
        "layer_of(w=parameter($))",
        "sum(len(n) for n, _ in @.named_parameters())",
        "@.register_parameter('p' * $, parameter($))",
        TENSORS,
    ),
    "state_dict": Kind(
        "buffered($)",
        "@.state_dict()['b']",
        "@.load_state_dict({'b': torch.full((), float($))})",
        TENSORS,
    ),
    "module.to": Kind(
        "layer_of(w=parameter($))",
        "(2.0 if @.w.dtype is torch.float64 else 3.0)",
        "@.to(torch.float64 if $ == 3 else torch.float32)",
        TENSORS,
    ),
    "requires_grad_ module": Kind(
        "layer_of(w=parameter($))",
        "(2.0 if @.w.requires_grad else 3.0)",
        "@.requires_grad_($ == 3)",
        TENSORS,
    ),
    "eval": Kind(
        "torch.nn.Dropout(0.5)",
        "@(torch.ones(())) * 0 + (2.0 if @.training else 3.0)",
        "@.eval() if $ == 3 else @.train()",
        TENSORS,
    ),
    "batchnorm": Kind("torch.nn.BatchNorm1d(1)", "@.running_mean[0] + 1", "@(torch.full((2, 1), float($)))", TENSORS),
    "pre hook": Kind("prehooked($)", "@(torch.ones(()))", "rehook2(@, $)", TENSORS + """
def prehooked(v):
    m = torch.nn.Identity()
    m.register_forward_pre_hook(lambda mod, args: (args[0] * v,))
    return m
def rehook2(m, v):
    m._forward_pre_hooks.clear()
    m.register_forward_pre_hook(lambda mod, args: (args[0] * v,))
"""),
    "global hook": Kind(
        "ghook($)",
        "PASS(torch.ones(()))",
        "ghook($)",
        """PASS = torch.nn.Identity()
HANDLE = []
def ghook(v):
    for h in HANDLE: h.remove()
    def hook(mod, args, out): return out * v if mod is PASS else None
    HANDLE[:] = [torch.nn.modules.module.register_module_forward_hook(hook)]
""",
        "HANDLE and HANDLE[0].remove()",
    ),
    "scale of a norm": Kind("normed($)", "@.eps", "@.eps = $", TENSORS + """
def normed(v):
    m = torch.nn.LayerNorm(3)
    m.eps = v
    return m
"""),
    "lr scheduler": Kind("scheduled($)", "@.get_last_lr()[0]", "@.step()", TENSORS + """
def scheduled(v):
    return torch.optim.lr_scheduler.StepLR(optimizer(v), 1, 0.5)
"""),
    "scheduler's epoch": Kind("scheduled($)", "@.last_epoch + 1", "@.step($)", TENSORS + """
def scheduled(v):
    return torch.optim.lr_scheduler.StepLR(optimizer(v), 1, 0.5)
"""),
    "add_param_group": Kind(
        "optimizer($)",
        "len(@.param_groups)",
        "@.add_param_group({'params': [torch.nn.Parameter(torch.ones(1))]})",
        TENSORS,
    ),
    "optimizer state cleared": Kind("adam($)", "len(@.state) + 1", """@.state.clear()
if $ != 3:
    @.state[@.param_groups[0]['params'][0]]['n'] = $""", TENSORS),
    "scaler": Kind("torch.amp.GradScaler('cpu', init_scale=float($))", "@.get_scale()", "@.update(float($))", TENSORS),
    "swa": Kind(
        "torch.optim.swa_utils.AveragedModel(layer_of(w=parameter($)))",
        "@.module.w.detach() + @.n_averaged",
        "@.update_parameters(layer_of(w=parameter($)))",
        TENSORS,
    ),
    "parametrized": Kind("paramd($)", "@.w.detach()", "@.parametrizations.w[0].v = $", TENSORS + """
class Scale(torch.nn.Module):
    def __init__(self, v):
        super().__init__()
        self.v = v
    def forward(self, x): return x * self.v
def paramd(v):
    m = layer_of(w=parameter(1))
    torch.nn.utils.parametrize.register_parametrization(m, 'w', Scale(v))
    return m
"""),
    "non-persistent buffer": Kind("np($)", "@.b", "@.b = torch.full((), float($))", TENSORS + """
def np(v):
    m = torch.nn.Module()
    m.register_buffer('b', torch.full((), float(v)), persistent=False)
    return m
"""),
    "None parameter": Kind("layer_of(w=None)", "(2.0 if @.w is None else 3.0)", "@.w = parameter($)", TENSORS),
    "buffer None": Kind(
        "bn($)",
        "(2.0 if @.b is None else 3.0)",
        "@.b = None if $ == 3 else torch.ones(())",
        TENSORS + """
def bn(v):
    m = torch.nn.Module()
    m.register_buffer('b', None)
    return m
""",
    ),
    "extra class attribute of Module": Kind("sub_of($)", "@.v", "type(@).v = $", TENSORS + """
def sub_of(v):
    return type('SubM', (torch.nn.Module,), {'v': v})()
"""),
    "forward of class": Kind("sub_of($)", "@(torch.ones(()))", "type(@).forward = lambda self, x: x * $", TENSORS + """
def sub_of(v):
    return type('SubM', (torch.nn.Module,), {'forward': lambda self, x: x * v})()
"""),
    "__call__ of Module class": Kind(
        "sub_of($)",
        "@(torch.ones(()))",
        "type(@).__call__ = lambda self, x: x * $",
        TENSORS + """
def sub_of(v):
    return type('SubM', (torch.nn.Module,), {'__call__': lambda self, x: x * v})()
""",
    ),
}
# fmt: on
