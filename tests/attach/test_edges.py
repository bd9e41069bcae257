"""Places where a host program does something unusual around a watched Linear."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._python_dispatch import TorchDispatchMode

from fp8watch.kernels import cpu
from fp8watch.layers import custom_ops
from fp8watch.layers.fp8_linear import SITE_KEY
from fp8watch.session.watch import Watch
from fp8watch_agent.fact_lists import without_number


def chain(inplace=False):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(inplace=inplace), nn.Linear(128, 32))


def gradients(model, x):
    model.zero_grad()
    model(x).pow(2).sum().backward()
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("recipe", ["observe", "blockwise"])
def test_what_follows_a_linear_may_work_in_place(attach, recipe):
    x = torch.randn(8, 64)
    there, here = chain(inplace=False), chain(inplace=True)
    attach(there, recipe=recipe)
    watch = attach(here, recipe=recipe)
    want, got = gradients(there, x), gradients(here, x)
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert not watch.guard.errors


@pytest.mark.parametrize("recipe", ["observe", "blockwise", "current", "delayed", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_torchs_default_dtype_and_device_are_of_no_concern(attach, recipe, backend):
    x = torch.randn(8, 64)
    plain, odd = chain(), chain()
    attach(plain, recipe=recipe, backend=backend)
    before = torch.get_default_dtype()
    results = [[gradients(plain, x) for _ in range(2)]]
    for dtype in (torch.float64, torch.bfloat16):
        odd = chain()
        torch.set_default_dtype(dtype)
        try:
            with torch.device("meta"):
                watch = attach(odd, recipe=recipe, backend=backend)
                results.append([gradients(odd, x) for _ in range(2)])
                watch.step()
        finally:
            torch.set_default_dtype(before)
        assert not watch.guard.errors
    for other in results[1:]:
        for got, want in zip(other, results[0], strict=True):
            assert all(torch.equal(got[name], want[name]) for name in want)


def test_a_gradient_that_is_differentiated_again_is_refused_not_dropped(attach):
    model = chain()
    attach(model)
    x = torch.randn(8, 64, requires_grad=True)
    y = model(x).sum()
    (slope,) = torch.autograd.grad(y, x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"differentiated again .*filter_fn"):
        (y + slope.pow(2).sum()).backward()


def test_create_graph_alone_gives_the_same_gradients(attach):
    model, x = chain(), torch.randn(8, 64)
    attach(model)
    want = gradients(model, x)
    got = torch.autograd.grad(model(x).pow(2).sum(), list(model.parameters()), create_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(got, want.values(), strict=True))


def test_torch_func_takes_gradients_once(attach):
    model, x = chain(), torch.randn(8, 64)
    attach(model)
    parameters = dict(model.named_parameters())

    def loss(parameters, x):
        return torch.func.functional_call(model, parameters, (x,)).pow(2).sum()

    want = gradients(model, x)
    got = torch.func.grad(loss)(parameters, x)
    assert all(torch.equal(got[name], want[name]) for name in want)

    def slope(x):
        return torch.func.grad(lambda z: loss(parameters, z))(x).pow(2).sum()

    with pytest.raises(RuntimeError, match="differentiated again"):
        torch.func.grad(slope)(x)


def test_observing_takes_inputs_that_have_no_rows_or_are_sparse(attach):
    narrow, wide = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
    wide.weight, wide.in_features = nn.Parameter(torch.zeros(64, 0)), 0
    watches = [attach(narrow, recipe="observe"), attach(wide, recipe="observe")]
    sparse = torch.eye(64)[:4]
    assert torch.equal(narrow(sparse.to_sparse()), nn.functional.linear(sparse, narrow.weight))
    assert wide(torch.zeros(4, 0)).shape == (4, 64)
    wide(torch.zeros(4, 0)).sum().backward()
    assert [dict(w.guard.errors) for w in watches] == [{}, {}]


def test_a_linear_of_which_only_the_bias_is_trained_is_observed_without_errors(attach):
    model = chain()
    model[0].weight.requires_grad_(False)
    watch = attach(model, recipe="observe")
    gradients(model, torch.randn(8, 64))
    watch.step()
    assert not watch.guard.errors


class WithHandle(nn.Linear):
    """Leaves out of copies what cannot be copied."""

    def __getstate__(self):
        return {k: v for k, v in self.__dict__.items() if k != "handle"}


def test_a_copy_follows_the_rules_of_its_class(attach):
    model = nn.Sequential(WithHandle(64, 64))
    model[0].handle = (i for i in range(3))  # a generator cannot be copied
    attach(model)
    twin = copy.deepcopy(model)
    assert type(twin[0]) is WithHandle
    assert "handle" not in twin[0].__dict__
    x = torch.randn(4, 64)
    assert torch.equal(twin(x), nn.functional.linear(x, model[0].weight, model[0].bias))


def test_a_tensor_that_holds_its_values_elsewhere_is_observed_as_what_it_holds(attach):
    x, want = torch.randn(2, 4, 64), chain()
    got = copy.deepcopy(want)
    watch = attach(got, recipe="observe")
    assert torch.equal(got(AsyncCollectiveTensor(x)), want(x))
    gradients(want, x)
    gradients(got, AsyncCollectiveTensor(x))
    pairs = zip(want.parameters(), got.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs)
    watch.step()
    assert watch.summary()["internal_errors"] == {}
    assert len(watch._recorder.step(0)[1]) == 2 * 5 - 1  # the first input has no gradient


@pytest.mark.parametrize("recipe", ["blockwise", "observe"])
def test_a_model_that_is_one_linear_has_a_name(attach, recipe):
    model = nn.Linear(64, 32)
    watch = attach(model, recipe=recipe)
    model(torch.randn(8, 64)).square().mean().backward()
    watch.step()
    kept = watch._recorder
    assert {site.module for site in kept.sites} == {"the model"}
    assert len(kept.steps[0][1]) == len(kept.sites) > 3
    assert watch.summary()["internal_errors"] == {}


def test_a_model_that_is_one_linear_is_known_by_its_name(attach):
    model = nn.Linear(64, 32)
    watch = attach(model, sites=["the model.weight"])
    watch.shadow("the model")
    forced = watch._plan.canary.forced
    assert forced
    watch.shadow(*(name for name, module in model.named_modules() if isinstance(module, nn.Linear)))
    assert watch._plan.canary.forced == forced
    with pytest.raises(ValueError, match="'fc1' is not watched; watched are the model"):
        watch.shadow("fc1")
    model(torch.randn(8, 64)).square().mean().backward()
    watch.step()
    assert {site.operand for site in watch._recorder.sites} == {"weight"}
    with pytest.raises(ValueError, match="such as 'the model'"):
        attach(nn.Linear(64, 32), sites=["fc1"])


def test_a_weight_that_holds_its_values_elsewhere_is_observed_as_what_it_holds(attach):
    x, want = torch.randn(8, 64), nn.Linear(64, 32).requires_grad_(False)
    got = copy.deepcopy(want)
    got.weight = nn.Parameter(AsyncCollectiveTensor(want.weight.detach()), requires_grad=False)
    watch = attach(got, recipe="observe")
    assert torch.equal(got(x), want(x))
    watch.step()
    assert watch.summary()["internal_errors"] == {}


def test_the_library_in_c_never_gets_the_pointer_of_a_subclass():
    x = torch.randn(8, 64)
    read = cpu._readable(AsyncCollectiveTensor(x))
    assert type(read) is torch.Tensor
    assert torch.equal(read, x)


def test_a_model_that_is_traced_while_it_is_observed_traces_as_it_computes(attach):
    model, x = chain(), torch.randn(8, 64)
    want = model(x)
    watch = attach(model, recipe="observe")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(model, (x,))
    assert torch.equal(traced(x), want)
    other = torch.randn(8, 64)
    assert torch.equal(traced(other), model(other))
    assert watch.summary()["internal_errors"] == {}


@torch.no_grad()
def test_what_traces_or_listens_meets_an_op_and_what_runs_now_does_without(attach):
    model, x, other = chain(), torch.randn(8, 64), torch.randn(8, 64)
    watch = attach(model)
    model.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(model, (x,))
    assert torch.equal(traced(other), model(other))
    heard = []

    class Listening(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            heard.append(str(func))
            return func(*args, **(kwargs or {}))

    with Listening():
        model(x)
    assert any("fp8watch::" in name or "fp8watch." in name for name in heard)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as calls:
        model(x)
    assert not [e.name for e in calls.events() if "fp8watch" in e.name]
    assert watch.summary()["internal_errors"] == {}


def test_a_lazy_linear_is_left_out(attach):
    model = nn.Sequential(nn.Linear(64, 64), nn.LazyLinear(32))
    watch = attach(model, recipe="observe")
    assert SITE_KEY in model[0].__dict__
    assert SITE_KEY not in model[1].__dict__
    gradients(model, torch.randn(8, 64))
    watch.step()
    assert watch.summary()["internal_errors"] == {}


class Factored(nn.Linear):
    """A Linear without a weight."""

    def __init__(self, size):
        super().__init__(size, size)
        del self.weight
        self.u, self.v = nn.Parameter(torch.randn(size, 4)), nn.Parameter(torch.randn(4, size))

    def forward(self, x):
        return x @ self.u @ self.v


class Unstored(nn.Embedding):
    """A table that is computed."""

    def __init__(self, num, dim):
        super().__init__(num, dim)
        del self.weight

    def forward(self, tokens):
        return tokens[..., None].expand(*tokens.shape, self.embedding_dim).float()


@pytest.mark.parametrize("odd", [lambda: Factored(64), lambda: Unstored(64, 64)])
def test_a_module_without_its_weight_is_left_as_it_is(attach, odd):
    model = nn.Sequential(nn.Linear(64, 64), odd())
    watch = attach(model)
    assert [SITE_KEY in m.__dict__ for m in model] == [True, False]
    assert watch.summary()["internal_errors"] == {}


class NoReader:
    """What `2>&1 | head` leaves."""

    def write(self, _text):
        raise BrokenPipeError(32, "Broken pipe")

    def flush(self):
        pass


@pytest.mark.parametrize("there", [None, NoReader()], ids=["closed", "no reader"])
def test_standard_error_that_is_gone_ends_no_training(attach, monkeypatch, there):
    model = chain()
    with monkeypatch.context() as patched:
        patched.setattr("sys.stderr", there)
        watch = attach(model)
        model(torch.randn(8, 64)).sum().backward()
        watch.step()
    assert watch.summary()["num_steps"] == 1
    assert watch.summary()["internal_errors"] == {}


def test_an_attach_that_fails_at_the_end_leaves_the_model_as_it_was(attach, monkeypatch):
    def broken(*_args, **_kwargs):
        raise MemoryError("planted")

    model, plans = chain(), len(custom_ops._plans)
    monkeypatch.setattr(Watch, "__init__", broken)
    with pytest.raises(MemoryError, match="planted"):
        attach(model)
    assert type(model[0]) is nn.Linear
    assert SITE_KEY not in model[0].__dict__
    assert len(custom_ops._plans) == plans


class OfTorchrl(nn.Sequential):
    """torchrl's losses list their parameters in a way of their own."""

    def named_parameters(self, prefix="", recurse=True):
        for name, p in super().named_parameters(prefix, recurse):
            yield f"{name}_params", p


@pytest.mark.parametrize("recipe", ["observe", "blockwise"])
def test_a_model_that_lists_its_parameters_in_its_own_way_is_watched(attach, recipe):
    model = OfTorchrl(nn.Linear(64, 64), nn.Linear(64, 64))
    watch = attach(model, recipe=recipe)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(2):
        model(torch.randn(32, 64)).sum().backward()
        optimizer.step()
    assert {site.module for site in watch._recorder.sites if site.operand == "weight"} == {"0", "1"}
    assert watch.summary()["internal_errors"] == {}


class CopiesItself(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Parameter(torch.randn(64, 64))

    def __reduce__(self):
        return type(self), ()

    def forward(self, x):
        return x @ self.proj


def test_what_has_no_name_is_the_model(attach, capsys):
    watch = attach(CopiesItself(), recipe="observe")
    assert "left out: the model (copies itself in its own way)" in capsys.readouterr().err
    assert watch._recorder.session.facts["left_out"] == "the model (copies itself in its own way)"


def test_what_is_left_out_is_named_whole_or_counted(attach):
    heads = nn.ModuleDict({f"attention_of_layer_{i}": nn.Linear(16, 16) for i in range(96)})
    model = nn.Sequential(nn.Linear(64, 64), heads)
    watch = attach(model, filter_fn=lambda module, fqn: fqn == "0")
    named, more = without_number(watch._recorder.session.facts["left_out"])
    items = named.split("; ")
    assert more > 0
    assert len(items) + more == 96
    assert {item.partition(" ")[2] for item in items} == {items[0].partition(" ")[2]}
