"""One call of a Linear that computes in FP8 by a forward of its own, in its turn: its three GEMMs against float64.

Shapes:     x [M, K], weight [N, K], y and its gradient [M, N], gradients of x and weight -> fields of slab rows
Thread:     training, and autograd's

What went in and what came out is seen, what happens between is not. So the output is held against the product of the
operands, and may lose what a cast to the module's format loses. Where its codes are seen (torchao's casts are functions
of a module) each is held against its operand, and the product against the codes: then a broken quantiser and a broken
GEMM are told apart. The gradients of x and of the weight are taken where autograd hands them on: behind an identity
before the module, and at the weight itself. That of a weight which several calls share is nobody's product, and left.
"""

from __future__ import annotations

import threading
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from fp8watch.layers.ask_why import why_codes
from fp8watch.layers.custom_ops import is_virtual, plan_of, rows_by_columns
from fp8watch.layers.impact_rows import LOOK, ImpactRows, impact_rows
from fp8watch.layers.operand_check import capturing
from fp8watch.layers.shadow_gemm import NUM_ROWS, TURN_COLUMNS, TURN_ROWS, Allowed, Factor, check_gemm
from fp8watch.numerics.formats import fp8_format
from fp8watch.observer.foreign import Foreign
from fp8watch.observer.observation_plan import ObservationPlan
from fp8watch.observer.pass_counter import graph_task
from fp8watch.observer.site_rows import GRAD_OUTPUT, INPUT, WEIGHT
from fp8watch.observer.unseen import unseen
from fp8watch.quantize.rounding_bound import check_codes
from fp8watch.quantize.self_consistency import Reads, check_quantiser

_running = threading.local()
_GEMM = {(INPUT, False): 0, (GRAD_OUTPUT, False): 1, (GRAD_OUTPUT, True): 2}
_ASSUMED = 2.0**-7
"""What a product may lose beside its casts where nothing is known: its own rounding to bfloat16, and of a bias."""


class Turn:
    """One call, from its forward to the end of its backward."""

    def __init__(
        self, plan: ObservationPlan, first: int, foreign: Foreign, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> None:
        self.plan, self.first, self.foreign = plan, first, foreign
        self.x, self.weight, self.bias = rows_by_columns(x.detach()), weight.detach(), bias
        self.gradient: Tensor | None = None
        self.codes: dict[tuple[int, bool], Factor] = {}
        self.closed = False
        self.shared = False  # another call of the module has begun before this one's backward
        self._casts: dict[int, int] = {}  # operand -> where what was cast in forward lies
        self._task = -1  # graph task of its backward
        self._awaited: set[int] = set()  # gradients that autograd will hand on: of INPUT, of WEIGHT
        self._hook: Any = None
        self._impact: ImpactRows | None = None  # of its output, until the gradient comes

    # ---- what autograd hands on --------------------------------------------------------------------------------------

    def saw_gradient(self, gradient: Tensor | None) -> None:
        """The gradient of the output: the module's own backward runs next."""
        if gradient is not None and self._task == -1 and not self.closed and not is_virtual(gradient):
            self.gradient, self._task = rows_by_columns(gradient.detach()), graph_task()
            _running.turn = self
            if self._impact is not None:
                self._impact.see(self.gradient)

    def saw_dgrad(self, gradient: Tensor | None) -> None:
        """The gradient of the input, of this call alone."""
        if gradient is None or self.gradient is None or self._task != graph_task():
            return
        self._check(GRAD_OUTPUT, False, rows_by_columns(gradient.detach()), (WEIGHT, True), None)
        self._has_come(INPUT)

    def saw_wgrad(self, gradient: Tensor | None) -> None:
        """The gradient of the weight, of all its calls in this backward."""
        if self._hook is not None:
            self._hook.remove()
        if gradient is None or self.gradient is None or self._task != graph_task():
            return
        if not self.shared:
            self._check(GRAD_OUTPUT, True, gradient.detach(), (INPUT, True), None)
        self._has_come(WEIGHT)

    @unseen
    def saw_output(self, y: Tensor) -> None:
        """What the module returned."""
        rows = rows_by_columns(y.detach())
        self._check(INPUT, False, rows, (WEIGHT, False), self.bias)
        if y.requires_grad and self.plan.canary.is_turn(self.first):
            run, known = self.plan.guard.run, (self.x, self.weight, self.bias)
            self._impact = run(LOOK, impact_rows, self.plan, self.first, *known, rows)

    def watch_weight(self, weight: Tensor) -> None:
        """See the gradient of the weight in the next backward, once."""
        if weight.requires_grad and weight.is_leaf and not self.foreign.tied:
            self._awaited.add(WEIGHT)
            self._hook = weight.register_hook(  # type: ignore[no-untyped-call]
                lambda gradient: self.plan.guard.run("foreign wgrad", self.saw_wgrad, gradient)
            )

    def _has_come(self, operand: int) -> None:
        self._awaited.discard(operand)
        if not self._awaited:
            self.close()

    def close(self) -> None:
        """Let go of everything."""
        if self._hook is not None:
            self._hook.remove()
        if getattr(_running, "turn", None) is self:
            _running.turn = None
        self.closed, self.gradient, self.bias, self._impact = True, None, None, None
        self.x = self.weight = self.x.new_empty((0, 0))
        self.codes.clear()
        if self.plan.turns.get(self.first) is self:
            del self.plan.turns[self.first]

    # ---- what is cast inside -----------------------------------------------------------------------------------------

    @unseen
    def saw_cast(self, operand: int, x: Tensor, data: Tensor, scale_inv: Tensor, tile: tuple[int, int]) -> None:
        """Hold codes against the operand that was cast, and keep them for the GEMM that reads them.

        Args:
            operand: INPUT, WEIGHT or GRAD_OUTPUT.
            x: [rows, columns] what was cast, in the operand's own rows × columns.
            data: its codes.
            scale_inv: float32 [rows / tile, columns / tile].
            tile: rows × columns that share a scale.
        """
        forward = self.gradient is None
        if forward:
            self._casts[operand] = x.data_ptr()
        elif x.data_ptr() != (self.gradient.data_ptr() if operand == GRAD_OUTPUT else self._casts.get(operand)):  # type: ignore[union-attr]
            return  # another module's
        columnwise = not forward and (operand != GRAD_OUTPUT or self._second_gradient())
        spec = self.foreign.casts.get((operand, columnwise))
        if spec is None:
            return
        self.codes[operand, columnwise] = Factor(data, scale_inv)
        plan, row = self.plan, self.plan.sites.row(self.first, operand, columnwise)
        canary, slab = plan.canary, plan.slab
        if slab is None or row in plan.sites.unobserved or not canary.is_turn(row):
            return
        if operand == GRAD_OUTPUT and row not in plan.sites.shapes:  # nobody wants the gradient of this input
            return
        if canary.takes(row, "columnwise" if columnwise else "operand"):
            began = perf_counter()
            near = None if tile == tuple(x.shape) else slab.tile_to_look_at(row)
            reads = Reads(data, scale_inv, tile)
            found = check_quantiser(x, reads, spec, None, near, canary.phase)
            slab.accumulate_quantiser(row, found)
            asking = plan.why.spent_s
            why_codes(plan, row, x, reads, spec, None, found)
            began += plan.why.spent_s - asking
            if (lost := check_codes(x, reads, spec, canary.phase)) is not None:
                slab.accumulate_quantiser(row, lost)
            canary.spent_s += perf_counter() - began

    def _second_gradient(self) -> bool:
        """Whether dgrad's cast of the gradient is over, or there is none."""
        return (GRAD_OUTPUT, False) in self.codes or (GRAD_OUTPUT, False) not in self.foreign.casts

    # ---- a GEMM ------------------------------------------------------------------------------------------------------

    def _check(
        self, operand: int, columnwise: bool, output: Tensor, other: tuple[int, bool], bias: Tensor | None
    ) -> None:
        plan, row = self.plan, self.plan.sites.row(self.first, operand, columnwise)
        canary, slab = plan.canary, plan.slab
        if (
            slab is None
            or not plan.observing
            or row in plan.sites.unobserved
            or not output.numel()
            or is_virtual(output)
        ):
            return
        forced = canary.is_forced(row) and bool(plan.step.sample.full[row])
        if not forced and not (canary.is_turn(row) and canary.takes(row, "wgrad" if columnwise else "GEMM")):
            return
        values = {INPUT: self.x, WEIGHT: self.weight, GRAD_OUTPUT: self.gradient}
        a, b = self.codes.get((operand, columnwise)), self.codes.get(other)
        gemm = _GEMM[operand, columnwise]
        if a is not None and b is not None:
            allow = Allowed(self.foreign.slack[gemm])
        else:
            first, second = values[operand], values[other[0]]
            if first is None or second is None or self.foreign.formats is None:
                return
            a, b = Factor(first), Factor(second)
            fmts = self.foreign.formats[operand], self.foreign.formats[other[0]]
            allow = Allowed(max(_ASSUMED, self.foreign.slack[gemm]), (fp8_format(fmts[0]), fp8_format(fmts[1])))
        if operand == INPUT:
            b = b.t()
        elif columnwise:
            a = a.t()
        began = perf_counter()
        size = (NUM_ROWS, None) if forced else (TURN_ROWS, TURN_COLUMNS)
        phase = plan.step.calls if forced else canary.phase
        found = check_gemm(output, a, b, bias, phase, num_rows=size[0], num_columns=size[1], allow=allow)
        slab.accumulate_gemm(row, found)
        if not forced:
            canary.spent_s += perf_counter() - began


class _BeforeInput(torch.autograd.Function):
    """Identity in both directions; backward shows the gradient of one call's input and passes it on untouched."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, turn: Turn) -> Tensor:
        ctx.turn = turn
        # the same memory, but no view to autograd, as in `fp8watch.layers.fp8_linear`
        alias: Tensor = torch.ops.aten._unsafe_view.default(x, x.shape)
        return alias

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        turn: Turn = ctx.turn
        turn.plan.guard.run("foreign dgrad", turn.saw_dgrad, gradient)
        return gradient, None


def begin_turn(site: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Turn | None:
    """The turn of a foreign module that is called now; None where it has none, or this call cannot be looked at."""
    plan = plan_of(site)
    if plan is None:
        return None
    first, canary = int(site) & 0xFFFFFFFF, plan.canary
    if first not in canary.turn and first not in canary.forced:
        return None
    foreign = plan.sites.foreign.get(first)
    if foreign is None or not plan.observing or plan.stopwatch is not None or graph_task() != -1:
        return None
    if is_virtual(x) or is_virtual(weight) or capturing(x):
        return None
    before = plan.turns.get(first)
    if before is not None and before.gradient is None and not before.closed:
        before.shared = True
    if first not in canary.forced and canary.took(plan.sites.row(first, INPUT, False), "GEMM"):
        return None
    turn = plan.turns[first] = Turn(plan, first, foreign, x, weight, bias)
    return turn


def behind(turn: Turn, x: Tensor) -> Tensor:
    """The input for the module, whose gradient the turn will see."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        return x
    turn._awaited.add(INPUT)
    seen: Tensor = unseen(_BeforeInput.apply)(x, turn)
    return seen


def enter(turn: Turn) -> None:
    """The module's forward begins in this thread."""
    _running.turn = turn


def leave() -> None:
    """The module's forward is over in this thread."""
    _running.turn = None


def running() -> Turn | None:
    """The turn whose forward, or whose backward, runs in this thread."""
    turn: Turn | None = getattr(_running, "turn", None)
    return turn
