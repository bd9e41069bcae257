"""The three GEMMs of a Linear in FP8, and which site feeds which.

Upstream:   fp8watch.session.site_placement
Downstream: fp8watch.layers.custom_ops
Shapes:     x [..., K], weight [N, K], bias [N] -> y [..., N] in the dtype that F.linear would give
Thread:     training, and autograd's

    GEMM    reads (tiles: blockwise)                     gives
    fprop   input rowwise 1×128, weight 128×128          y [M, N]
    dgrad   grad_output rowwise 1×128, weight 128×128    grad of input [M, K]
    wgrad   grad_output columnwise, input columnwise     grad of weight [N, K]

An operand is shared where its rowwise and columnwise copies have the same codes and scales, as a 128×128 weight has:
then one quantisation feeds both GEMMs. Under per-tensor recipes every operand is, under mxfp8 none.
The emulated path multiplies dequantised operands in float32 (within 3e-7 of float64, five orders below the
quantisation itself), adds the bias in float32, and casts last. For backward it keeps codes and scales: a byte an element.
A GEMM of which the recipe leaves an operand in high precision computes what F.linear would, in the operands' own dtype.
"""

from __future__ import annotations

import copyreg
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8watch.kernels import emulated_gemm
from fp8watch.layers.autograd_signature import signature_known
from fp8watch.layers.class_swap import swap
from fp8watch.layers.computed_weight import held_weight
from fp8watch.layers.custom_ops import (
    is_eager,
    look_at_output,
    plan_of,
    quantize_dequantize,
    rows_by_columns,
)
from fp8watch.layers.double_backward import apply_packed, once_only, packed_by
from fp8watch.layers.impact_rows import take_impact
from fp8watch.layers.local_part import is_dtensor
from fp8watch.layers.moved_linear import DEVICE_KEY, MARKS, as_before, is_moved, note_unseen, without_site
from fp8watch.layers.observe_linear import observe, observe_forward, rests
from fp8watch.layers.parameter_trail import linear_in_fp8, num_modes
from fp8watch.layers.saved_operands import dequantize_kept, quantize_for_backward
from fp8watch.layers.scaled_linear import Formats, ScaledLinear
from fp8watch.layers.vmap_rules import refuse_vmap, refused_forward_mode
from fp8watch.layers.wrapped_forward import lead_to_class
from fp8watch.numerics.operand_checks import OPERAND_DTYPES
from fp8watch.observer.site_rows import GRAD_OUTPUT, INPUT, WEIGHT
from fp8watch.recipe import OperandRecipe, Recipe

SITE_KEY = "_fp8watch_site"
OBSERVE_KEY = "_fp8watch_observe"
LAYOUT_KEY = "_fp8watch_layout"
SCALED_KEY = "_fp8watch_scaled"
GEMMS_KEY = "_fp8watch_gemms"
COMPUTES_KEY = "_fp8watch_computes"
NUMBER_KEY = "_fp8watch_number"
KEYS = (SITE_KEY, NUMBER_KEY, OBSERVE_KEY, LAYOUT_KEY, SCALED_KEY, GEMMS_KEY, COMPUTES_KEY, *MARKS)

Three = tuple[bool, bool, bool]


class Layout(NamedTuple):
    """What of a recipe the GEMMs of a Linear go by: constants, for which code is compiled."""

    shared: Three = (False, True, False)
    """Of input, weight, grad_output: whether one quantisation serves both directions."""
    gemms: Three = (True, True, True)
    """Of fprop, dgrad, wgrad: whether it is in FP8."""
    input_tile: tuple[int, int] = (128, 1)
    """Of the input's copy for wgrad, in its own rows × columns; −1: all of them."""
    weight_tile: tuple[int, int] = (128, 128)
    """Of the weight's copy for dgrad."""
    warms: bool = False
    """Whether there is a warm-up in high precision."""


BLOCKWISE = Layout()


def layout(recipe: Recipe) -> Layout:
    """Of the Linears under a recipe."""

    def kept(spec: OperandRecipe | None) -> tuple[int, int]:
        if spec is None or spec.tile is None:
            return -1, -1
        return spec.tile[1], spec.tile[0]  # across: tiles run along the other axis, blocks have two like ones

    return Layout(recipe.shared, recipe.gemms, kept(recipe.input), kept(recipe.weight), recipe.warmup_steps > 0)


@signature_known
class _Fp8Linear(torch.autograd.Function):
    """y = x·wᵀ + b with quantised operands. Saved for backward: codes and scale_inv of the operands that it reads, and
    the operands themselves of GEMMs in high precision."""

    vmap = staticmethod(refuse_vmap)

    @staticmethod
    def forward(
        x_MK: Tensor,
        weight_NK: Tensor,
        bias_N: Tensor | None,
        site: Tensor,
        count: bool,
        dgrad: bool,
        wgrad: bool,
        how: Layout,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        of_fprop, of_dgrad, of_wgrad = how.gemms
        with torch.autocast(x_MK.device.type, enabled=False):
            xr, xc, xc_scale = _operand(
                x_MK, site, INPUT, count, of_fprop, wgrad and of_wgrad, how.input_tile, how.warms
            )
            wr, wc, wc_scale = _operand(
                weight_NK, site, WEIGHT, count, of_fprop, dgrad and of_dgrad, how.weight_tile, how.warms
            )
            if of_fprop:
                y = emulated_gemm.fprop(xr, wr, bias_N, x_MK.dtype)
                if count:
                    look_at_output(y, site, INPUT, False, xr, wr, bias_N)
            else:
                y = F.linear(x_MK, weight_NK.to(x_MK.dtype), None if bias_N is None else bias_N.to(x_MK.dtype))
            return y, xc, xc_scale, wc, wc_scale

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, weight, bias, site, count, dgrad, wgrad, how = inputs
        _, of_dgrad, of_wgrad = how.gemms
        _, xc, _, *rest = output  # by the third `once_only` reaches x and weight
        ctx.mark_non_differentiable(*(output[1:] if torch.compiler.is_compiling() else (xc, *rest)))
        ctx.set_materialize_grads(torch.compiler.is_compiling())
        ctx.save_for_backward(
            *output[1:], site, weight if dgrad and not of_dgrad else None, x if wgrad and not of_wgrad else None
        )
        ctx.count, ctx.dgrad, ctx.wgrad, ctx.how = count, dgrad, wgrad, how
        ctx.dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)

    @staticmethod
    def backward(ctx: Any, grad_MN: Tensor | None, *_: Tensor) -> tuple[Tensor | None, ...]:
        if grad_MN is None:  # what reads y gives it none: then there is none in front of it
            return (None,) * 8
        xc, xc_scale, wc, wc_scale, site, weight, x = ctx.saved_tensors
        x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        dgrad, wgrad = ctx.needs_input_grad[0] and ctx.dgrad, ctx.needs_input_grad[1] and ctx.wgrad
        shared, (_, of_dgrad, of_wgrad) = ctx.how.shared[GRAD_OUTPUT], ctx.how.gemms
        dx = dw = db = None
        with torch.no_grad(), torch.autocast(grad_MN.device.type, enabled=False):
            in_fp8 = dgrad and of_dgrad, wgrad and of_wgrad
            if any(in_fp8):
                rowwise, columnwise = in_fp8[0] or shared, in_fp8[1] and not shared
                gr, gc = quantize_dequantize(
                    grad_MN, site, GRAD_OUTPUT, count=ctx.count, rowwise=rowwise, columnwise=columnwise
                )
                gc = gr if shared else gc
            elif ctx.count:  # that backward came by is noted all the same: steps end behind it
                observe(grad_MN, site, GRAD_OUTPUT, False, False)
            if in_fp8[0]:
                w = dequantize_kept(wc, wc_scale, site, WEIGHT)
                dx = emulated_gemm.dgrad(gr, w, x_dtype)
                if ctx.count:
                    look_at_output(dx, site, GRAD_OUTPUT, False, gr, w)
                del w
            elif dgrad:
                dx = grad_MN.mm(weight.to(grad_MN.dtype)).to(x_dtype)
            if in_fp8[1]:
                values = dequantize_kept(xc, xc_scale, site, INPUT)
                dw = emulated_gemm.wgrad(gc, values, weight_dtype)
                if ctx.count:
                    look_at_output(dw, site, GRAD_OUTPUT, True, gc, values)
            elif wgrad:
                dw = grad_MN.t().mm(x).to(weight_dtype)
        if bias_dtype is not None and ctx.needs_input_grad[2]:
            with torch.autocast(grad_MN.device.type, enabled=False):
                db = grad_MN.sum(dim=0, dtype=torch.float32).to(bias_dtype)
        made_of = grad_MN, xc_scale
        return once_only(dx, *made_of), once_only(dw, *made_of), db, None, None, None, None, None


# torch asks for it in each call, and makes it anew where nobody left it: a third of a percent of a small model's step
_Fp8Linear.forward.__signature__ = inspect.signature(_Fp8Linear.forward)  # type: ignore[attr-defined]


def _operand(
    x_MK: Tensor, site: Tensor, operand: int, count: bool, now: bool, later: bool, tile: tuple[int, int], warms: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """What the GEMMs read of a forward operand, see `quantize_for_backward`; nothing where none of them is in FP8."""
    if now or later:
        return quantize_for_backward(x_MK, site, operand, count=count, now=now, later=later, tile=tile, warms=warms)
    return tuple(x_MK.new_empty((0,), dtype=torch.float32) for _ in range(3))  # type: ignore[return-value]


class _ObserveOutput(torch.autograd.Function):
    """Identity in both directions; backward shows the gradient to its sites and passes it on untouched. For graphs that
    are compiled or transformed; in eager mode a hook on the output does that."""

    generate_vmap_rule = True

    @staticmethod
    def forward(y: Tensor, site: Tensor, dgrad: bool, wgrad: bool) -> Tensor:
        # the same memory, but no view to autograd, which would forbid what follows in place, such as ReLU(inplace=True)
        alias: Tensor = torch.ops.aten._unsafe_view.default(y, y.shape)
        return alias

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])
        ctx.directions = inputs[2:]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (site,) = ctx.saved_tensors
        observe(rows_by_columns(grad.detach()), site, GRAD_OUTPUT, *ctx.directions)
        return grad, None, None, None


class _ObserveTransformed(_ObserveOutput):
    """The same for torch.func, which may differentiate it in forward mode. The compiler takes no Function with a jvp of its own."""

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        alias: Tensor = torch.ops.aten._unsafe_view.default(tangent, tangent.shape)
        return alias


def _check(x: Tensor, weight: Tensor, autocast: bool) -> None:
    """Refuse what F.linear refuses, in words; everything else has a right result.

    Raises:
        RuntimeError, as F.linear does: a dtype that is not quantised, or one that differs from the weight's outside of
            autocast; features, devices or layout that do not fit the weight's.
    """
    if x.dtype not in OPERAND_DTYPES:
        raise RuntimeError(
            f"input has dtype {x.dtype}: must be float32, bfloat16 or float16; cast it first, e.g. x.float()"
        )
    if x.is_nested or x.layout != torch.strided:
        raise RuntimeError("input is a nested or sparse tensor: must be dense; pad it, or use recipe='observe'")
    if x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        raise RuntimeError(
            f"input has shape {tuple(x.shape)}, the weight {tuple(weight.shape)}: the input's last dimension must be "
            f"{weight.shape[1]}, the weight's in_features"
        )
    if x.dtype != weight.dtype and not autocast:
        raise RuntimeError(
            f"input has dtype {x.dtype}, the weight {weight.dtype}: must be equal outside of autocast; cast the input "
            "or use torch.autocast"
        )


def fp8_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    site: Tensor,
    *,
    count: bool,
    how: Layout = BLOCKWISE,
    scaled: Formats | None = None,
) -> Tensor:
    """`F.linear` on the FP8 path of a site, for any leading shape.

    Under autocast the input is cast as F.linear would cast it, and the result has autocast's dtype; the weight is
    quantised from its own precision. `count` says whether the call enters the statistics, `how` what of the recipe the
    GEMMs go by, `scaled` the formats of operands whose codes are multiplied by torch._scaled_mm.

    Raises:
        RuntimeError: an input that F.linear would refuse too, or one that is not quantised (float64, nested); inside of
            torch.func.vmap, or differentiated in forward mode.
    """
    if x.device != weight.device:
        raise RuntimeError(
            f"input is on {x.device}, the weight on {weight.device}: must be on one device; move the input"
        )
    device = x.device.type
    autocast = torch.is_autocast_enabled(device)
    if autocast and x.dtype in OPERAND_DTYPES:
        x = x.to(torch.get_autocast_dtype(device))
    _check(x, weight, autocast)
    if not torch.compiler.is_compiling() and num_modes():
        linear_in_fp8(x, weight)
    wgrad = weight.requires_grad and torch.is_grad_enabled()
    rows = x if x.dim() == 2 else rows_by_columns(x)
    dgrad = x.requires_grad and torch.is_grad_enabled()
    apply: Callable[..., Any] = _Fp8Linear.apply
    given: tuple[Any, ...] = rows, weight, bias, site, count, dgrad, wgrad, how
    if scaled is not None and x.numel():
        apply, given = ScaledLinear.apply, (rows, weight, bias, site, count, wgrad, scaled)
    try:
        packed = not torch.compiler.is_compiling() and packed_by(False) is not None
        y = (apply_packed(apply, *given) if packed else apply(*given))[0]
    except NotImplementedError as error:
        raise refused_forward_mode(error) from None
    if count and how.gemms[0] and y.requires_grad and not torch.compiler.is_compiling():
        plan = plan_of(site)
        if plan is not None and plan.canary.turn and (first := int(site) & 0xFFFFFFFF) in plan.canary.turn:
            take_impact(plan, first, rows, weight, bias, y)
    out: Tensor = y.reshape(*x.shape[:-1], weight.shape[0])
    return out


class WatchedLinear(nn.Linear):
    """Mixin that `attach` puts over the class of a Linear. Parameters, hooks, names and state_dict stay as they are.

    Without its site (after detach, in a copy, in a loaded pickle) it is the plain Linear again.
    """

    _fp8watch_base: type[nn.Linear]

    def forward(self, input: Tensor) -> Tensor:
        """[..., K] -> [..., N]."""
        site, weight = self.__dict__.get(SITE_KEY), self.weight  # read once: see computed_weight
        if site is None:
            return F.linear(input, weight, self.bias)
        if type(weight) is not nn.Parameter and is_dtensor(weight):
            return as_before(self, input, weight, self.__dict__[NUMBER_KEY])
        if input.device != self.__dict__[DEVICE_KEY] and is_moved(self):
            return as_before(self, input, weight, self.__dict__[NUMBER_KEY])
        if not self.__dict__[OBSERVE_KEY]:
            how, scaled = self.__dict__[LAYOUT_KEY], self.__dict__.get(SCALED_KEY)
            return fp8_linear(input, weight, self.bias, site, count=self.training, how=how, scaled=scaled)
        y = F.linear(input, weight, self.bias)
        if not self.training or input.is_nested or input.layout != torch.strided:
            return y
        if not torch.compiler.is_compiling() and rests(self.__dict__[NUMBER_KEY], y):
            return y
        return observed(self, input, weight, y, site)

    def _replicate_for_data_parallel(self) -> Any:
        return without_site(self, super()._replicate_for_data_parallel(), KEYS)  # type: ignore[no-untyped-call]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles are of the plain class: a file loads without fp8watch, a copy writes into no slab."""
        own = getattr(self, "__getstate__", None)  # objects have one from Python 3.11 on, and a class may have its own
        state = self.__dict__ if own is None else own()
        if isinstance(state, dict):
            state = {k: v for k, v in state.items() if k not in KEYS}
        return copyreg._reconstructor, (self._fp8watch_base, object, None), state  # type: ignore[attr-defined]


def observed(module: nn.Linear, x: Tensor, weight: Tensor, y: Tensor, site: Tensor) -> Tensor:
    """The output of a Linear that computes as before, looked at together with its operands and, in backward, its gradient."""
    if torch._C._get_tracing_state() is not None:  # what torch.jit.trace writes down is the model's alone
        return y
    if is_eager(y, x, weight):
        observe_forward(x, weight, y, site)
        return y
    if is_dtensor(weight) or is_dtensor(y):
        note_unseen(module, y, module.__dict__[NUMBER_KEY], sharded=True)
        return y
    grad = torch.is_grad_enabled()
    wgrad = weight.requires_grad and grad
    observe(rows_by_columns(x.detach()), site, INPUT, True, wgrad)
    observe(weight.detach(), site, WEIGHT, True, False)
    look_at_output(y.detach(), site, INPUT, False)
    if y.requires_grad:
        compiles = torch.compiler.is_compiling()
        if compiles and torch._C._are_functorch_transforms_active():
            return y  # the compiler takes no autograd.Function inside of torch.func: gradients stay unseen
        shown = _ObserveOutput if compiles else _ObserveTransformed
        out: Tensor = shown.apply(y, site, x.requires_grad, wgrad)  # type: ignore[no-untyped-call]
        return out
    return y


def take_over(
    module: nn.Linear,
    site: Tensor,
    *,
    observe_only: bool,
    how: Layout = BLOCKWISE,
    scaled: Formats | None = None,
    mixin: type[WatchedLinear] = WatchedLinear,
) -> None:
    """Put a Linear on its site, in place. `how` and `scaled` are constants: compiled code is made for them. `mixin` goes
    over its class."""
    module.__dict__[SITE_KEY], module.__dict__[NUMBER_KEY] = site, int(site)
    module.__dict__[DEVICE_KEY] = held_weight(module).device
    if scaled is not None:
        module.__dict__[SCALED_KEY] = scaled
    module.__dict__[LAYOUT_KEY] = how
    module.__dict__[OBSERVE_KEY] = observe_only
    if not isinstance(module, WatchedLinear):  # it is after a detach under FSDP2, which put its class on top
        swap(module, mixin)
    lead_to_class(module)


def release(module: nn.Module) -> None:
    """Undo `take_over`. When another class came on top since, the class stays and only the site goes."""
    for key in KEYS:
        module.__dict__.pop(key, None)
    cls = type(module)
    if "_fp8watch_base" in cls.__dict__:
        module.__class__ = cls.__dict__["_fp8watch_base"]
        lead_to_class(module)
