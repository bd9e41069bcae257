"""Observer of Transformer Engine modules: their quantised operands as they enter a GEMM.

Shapes:     codes and scales of a GEMM's operands -> TileStats of their sites     Thread: training, and autograd's

In the steps of a module's turn, but for what its GEMMs return: a forward pre-hook keeps the operand that Python sees, a hook on the output keeps the gradient,
and the functions through which all modules multiply (`general_gemm` and its grouped form) are wrapped to see codes and
scales. Nothing is quantised a second time, and an error in here is counted and never reaches training. Operands that only
debug mode shows come from te_debug.

An operand that enters a GEMM and cannot be read is reported with the reason (te_unread), because a module without
statistics looks healthy.

Source: transformer_engine/pytorch, versions 2.8.0 to 2.20.2: modules call `general_gemm(A, B, …, layout=…)` with
weight and input (TN: fprop), weight and grad_output (NN: dgrad), input and grad_output (NT: wgrad).
Not seen: a module inside torch.compile, `te.ops`, attention, grouped tensors from 2.17 on (one call for all experts).

State of this file: `make test-te` runs the Python packages of Transformer Engine over a stand-in for their extension, on
a CPU. On an H200 2.20.2 ran with its own kernels (docs/gpu.md).
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from fp8watch.integrations import te_debug
from fp8watch.integrations.te_amax_group import AmaxGroup
from fp8watch.integrations.te_frames import Frame, Hook
from fp8watch.integrations.te_modules import (
    SiteNumerics,
    TeModule,
    is_bound,
    name_of,
    numerics_of,
    recipe_of,
)
from fp8watch.integrations.te_nvfp4 import rotated
from fp8watch.integrations.te_package import load
from fp8watch.integrations.te_products import products_of
from fp8watch.integrations.te_seams import Seams
from fp8watch.integrations.te_stats import derived, exact, num_suspect
from fp8watch.integrations.te_tensors import QuantizedView, direction_of, read
from fp8watch.integrations.te_turns import TeTurns
from fp8watch.integrations.te_unread import Tell, Unread, silent
from fp8watch.numerics.tile_stats import TileStats
from fp8watch.observer.pass_counter import in_backward
from fp8watch.observer.step_sample import EVERYTHING, YES, StepSample
from fp8watch.recipe.framework import STOCK, transformer_engine
from fp8watch_agent.guard import Guard

Record = Callable[[int, tuple[int, int], TileStats], None]
"""(row, shape of the operand, statistics): what becomes of one observation."""


_MODULE_FILES = ("linear", "layernorm_linear", "layernorm_mlp", "grouped_linear")
_FUNCTIONS = ("general_gemm", "general_grouped_gemm")
_OPERANDS = {  # layout -> operand and direction of A and of B
    "TN": (("weight", False), ("input", False)),
    "NN": (("weight", True), ("grad_output", False)),
    "NT": (("input", True), ("grad_output", True)),
}


class TeObserver:
    """Observes the Transformer Engine modules of one model, from `start` to `stop`.

    Args:
        modules: as `te_modules.find` gives them.
        first_row: row of the first site; the others follow in the order of the modules' sites.
        record: takes each observation.
        guard: counts what goes wrong.
        heavy: whether to measure energies, moments and depth where the operand is seen.
        entered: told of each forward (False) and backward (True) of a module in training, sampled or not.
        tell: takes what could not be read: a line for people, and facts of the session.
        turns: whose turn it is, and what is checked then (te_turns); None: nothing is.
        output: takes what each GEMM returned, sampled or not: (row of the operand that it is told at, [M, N]).
    """

    def __init__(
        self,
        modules: list[TeModule],
        first_row: int,
        record: Record,
        guard: Guard,
        *,
        heavy: bool = True,
        entered: Callable[[bool], None] = lambda backward: None,
        tell: Tell = silent,
        turns: TeTurns | None = None,
        output: Callable[[int, torch.Tensor], None] = lambda row, y: None,
    ) -> None:
        self.turns, self._output = turns, output
        self._entered, self._tell = entered, tell
        self.version, self.backend, self.unread = "", STOCK, Unread()
        self.numerics: dict[int, SiteNumerics] = {}
        self.modules, self._record, self._guard, self._heavy = modules, record, guard, heavy
        self._rows: dict[tuple[str, str, str], int] = {}
        self.rows_of: dict[int, list[int]] = {}  # id of a module -> its rows, which are looked at in the same steps
        for te in modules:
            self.rows_of[id(te)] = [first_row + len(self._rows) + i for i in range(len(te.sites))]
            for site in te.sites:
                self._rows[site.fqn, site.operand, site.direction] = first_row + len(self._rows)
        self.sample, self._num_steps = EVERYTHING, 0
        self._debugs, self._places = False, {id(te): place for place, te in enumerate(modules)}
        self._suspects: dict[int, torch.Tensor] = {}
        self.amax_group = AmaxGroup()
        self._local = threading.local()
        self._hooks: list[Any] = []
        self._seams = Seams()

    def start(self) -> str | None:
        """Install the hooks. Returns None, or the reason why GEMMs are not observable: then nothing is observed."""
        package, reason = load()
        if package is None:
            return reason
        self.version, self.backend = reason, transformer_engine()
        for name in _MODULE_FILES:
            module = importlib.import_module(f"{package.__name__}.module.{name}")
            for function in _FUNCTIONS:
                self._seams.replace(module, function, self._multiply)
        if not self._seams:
            return f"transformer_engine {reason} has no {' or '.join(_FUNCTIONS)} in its modules: not a version that is known"
        for te in self.modules:
            self._hooks.append(te.module.register_forward_pre_hook(Hook(self._before(te))))
            self._hooks.append(te.module.register_forward_hook(Hook(self._after), always_call=True))
        self._debugs = te_debug.join(self)
        return None

    def stop(self) -> None:
        """Remove all hooks."""
        te_debug.leave(self)
        for te in self.modules if self._debugs else ():
            te_debug.set_turn(te.module, False)
        self._debugs = False
        for hook in self._hooks:
            hook.remove()
        self._seams.put_back()
        self._hooks.clear()

    def take_suspects(self) -> dict[int, int]:
        """Rows with suspect tiles since the last call, and how many. Synchronises with the device."""
        rows, counts = self.pop_suspects()
        return {} if counts is None else {row: n for row, n in zip(rows, counts.tolist(), strict=True) if n}

    def pop_suspects(self) -> tuple[list[int], torch.Tensor | None]:
        """Rows checked since the last call, and the number of suspect tiles of each, on the device."""
        rows, counts = list(self._suspects), list(self._suspects.values())
        self._suspects.clear()
        return rows, torch.stack(counts) if counts else None

    def begin_step(self, sample: StepSample) -> None:
        """What the step that begins looks at."""
        self.sample = sample
        self._num_steps += 1
        if self._debugs:
            te_debug.end_step(self._num_steps)

    def end_step(self) -> None:
        """Report what could not be read in this sampled step."""
        names = {row: fqn for (fqn, *_), row in self._rows.items()}
        self._guard.run("te amax group", self.amax_group.look, [te.module for te in self.modules], self._tell)
        self._guard.run("te unread", self.unread.report, self.numerics, names, self.version, self._tell)

    def note_operand(self, operand: str, x: torch.Tensor, layer: str | None = None) -> None:
        """Take an operand before its cast, from an observed quantiser (te_recipe) or from debug mode (te_debug).

        Args:
            operand: input, weight or grad_output.
            x: [..., K].
            layer: Transformer Engine's name of the GEMM, where it says.
        """
        frame = self._frame(operand == "grad_output")
        if frame is None or not frame.sampled:
            return
        if layer is None:
            frame.operands.setdefault(operand, []).append(x.detach())
        else:
            frame.before[operand, te_debug.gemm_of(frame.te.kind, layer)] = x.detach()

    def show_operand(self, operand: str, x: torch.Tensor, layer: str) -> None:
        """Take an operand before its cast, from debug mode (te_debug)."""
        self._guard.run("te debug", self.note_operand, operand, x, layer)

    def wants_operands(self) -> bool:
        """Whether the forward that runs now is to show its operands."""
        return (frame := self._frame(backward=False)) is not None and frame.debug

    # ---- module hooks ----------------------------------------------------------------------------------------

    def _before(self, te: TeModule) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            self._guard.run("te forward", self._enter, te, args)

        return hook

    def _enter(self, te: TeModule, args: tuple[Any, ...]) -> None:
        stack = self._stack()
        stack.append(None)  # whatever happens below: each call must leave what it entered
        debug = False
        if te.module.training and not torch.compiler.is_compiling():
            again = in_backward()
            first = self.rows_of[id(te)][0]
            sampled = bool(self.sample.full[first]) or (self.turns is not None and self.turns.has(first))
            frame = stack[-1] = Frame(te, again=again, sampled=sampled, trains=torch.is_grad_enabled())
            if not again:
                self._entered(False)
            debug = sampled and (self.sample.full is YES or te_debug.is_due(self._num_steps, self._places[id(te)]))
            if sampled and te.kind in ("Linear", "GroupedLinear") and args and isinstance(args[0], torch.Tensor):
                frame.operands["input"] = [args[0].detach()]
        if self._debugs and not torch.compiler.is_compiling():
            debug = te_debug.set_turn(te.module, debug)
            if (entered := stack[-1]) is not None:
                entered.debug = debug

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._guard.run("te forward", self._leave, output)

    def _leave(self, output: Any) -> None:
        frame = self._stack().pop() if self._stack() else None
        first = output[0] if isinstance(output, tuple) and output else output
        if frame is None or not isinstance(first, torch.Tensor):
            return
        if frame.sampled and not frame.again and not frame.num_products and first.numel():
            for row in self.rows_of[id(frame.te)]:
                self.unread.note(frame.te.kind, "its products do not pass where they are seen: fused or compiled", row)
        if not first.requires_grad:
            return
        if not frame.again:  # a recomputed frame is followed by its backward at once, or dropped
            frame.forget()  # the observer must not keep high-precision operands alive until backward
        hook: Any = first.register_hook
        hook(lambda grad: self._guard.run("te backward", self._enter_backward, frame, grad))

    def _enter_backward(self, frame: Frame, grad: torch.Tensor) -> None:
        self._entered(True)
        self._local.backward = frame.backward(grad)

    def _stack(self) -> list[Frame | None]:
        if not hasattr(self._local, "stack"):
            self._local.stack = []
        stack: list[Frame | None] = self._local.stack
        return stack

    def _frame(self, backward: bool) -> Frame | None:
        if backward:
            frame: Frame | None = getattr(self._local, "backward", None)
            return frame
        return self._stack()[-1] if self._stack() else None

    # ---- GEMMs -------------------------------------------------------------------------------------

    def _multiply(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        layout, turns = str(kwargs.get("layout", "TN")), self.turns
        turn = turns is not None and turns.any
        if len(args) >= 2:
            self._guard.run("te gemm", self._see, args[0], args[1], layout, self.sample.any_full or turn)
        out = original(*args, **kwargs)
        frame = self._frame(layout != "TN") if len(args) >= 2 else None
        if frame is not None and not (frame.again and layout == "TN"):  # else a recomputation
            self._guard.run("te product", self._made, frame, args[0], args[1], layout, kwargs, out)
        return out

    def _made(self, frame: Frame, a: Any, b: Any, layout: str, how: Mapping[str, Any], out: Any) -> None:
        """What a GEMM returned: whether it is finite, and in the module's turn whether it is the product."""
        products = products_of(frame, self._rows, a, b, layout, how, out)
        if not how.get("accumulate"):
            for each in products:
                self._output(each.row, each.output)
        if self.turns is None or not self.turns.any:
            return
        for each in products:  # an expert that has not had a token has not said how it is quantised
            view = read(each.b, layout == "NT") if each.row not in self.numerics else ""
            if not isinstance(view, str) and not view.codes.numel():
                self.numerics[each.row] = numerics_of(direction_of(each.b, layout == "NT"), view, exact=True)
        self.turns.gemm(self.rows_of[id(frame.te)][0], products, layout, how)

    def _see(self, a: Any, b: Any, layout: str, looked_at: bool) -> None:
        frame = self._frame(layout != "TN")
        if layout not in _OPERANDS or frame is None:
            return
        number = frame.num_products.get(layout, 0)
        frame.num_products[layout] = number + 1
        if not looked_at or not frame.sampled or (layout == "TN" and frame.again):
            return
        if frame.te.kind == "GroupedLinear":
            pairs = list(enumerate(zip(a, b, strict=True))) if isinstance(a, list | tuple) else []
        else:
            last = frame.te.num_gemms - 1
            pairs = [(number if layout == "TN" else last - number, (a, b))]
        offsets: dict[str, int | None] = {"input": 0, "grad_output": 0}
        for index, tensors in pairs:
            if not 0 <= index < frame.te.num_gemms:
                continue
            for tensor, (operand, columnwise) in zip(tensors, _OPERANDS[layout], strict=True):
                if operand == "weight" and columnwise:  # the same codes and scales as rowwise, where it was written
                    self._guard.run("te copy", self._look_at_copy, frame, index, tensor)
                    continue
                offset = offsets.get(operand, 0)
                rows = self._look(frame, index, tensor, operand, columnwise, offset)
                if not columnwise and operand != "weight" and frame.trains:  # while the operand itself is at hand
                    self._look(frame, index, tensor, operand, True, offset, ahead=True)
                if operand in offsets:
                    offsets[operand] = None if offset is None or rows is None else offset + rows
        if layout == "NT" and number == frame.te.num_gemms - 1:
            frame.forget()

    def _look_at_copy(self, frame: Frame, index: int, weight: Any) -> None:
        """In the module's turn: the transposed copy of a weight, which dgrad alone reads."""
        turns = self.turns
        if turns is None or not turns.has(self.rows_of[id(frame.te)][0]):
            return
        row = self._rows[name_of(frame.te, index), "weight", "rowwise"]
        view, rowwise = read(weight, True), read(weight, False)
        if isinstance(view, str) or view.tile == view.shape:
            return
        x = frame.operand(index, "weight", view, None)
        if x is not None and row in self.numerics:
            facts = self.numerics[row]
            turns.operand(row, x, view, facts.recipe, facts.power_2_scale, facts.eps, what="copy")
        if not isinstance(rowwise, str):
            turns.copies(row, rowwise, view)

    def _look(
        self,
        frame: Frame,
        index: int,
        tensor: Any,
        operand: str,
        columnwise: bool,
        offset: int | None,
        *,
        ahead: bool = False,
    ) -> int | None:
        """Observe one direction of one operand of one GEMM, once per call; returns its number of rows, None when
        unknown.

        Any error is noted as an unread operand, and the other operands are observed all the same.

        Args:
            offset: of its rows in what Python saw, all experts in one tensor; None where that is unknown.
            ahead: the product reads the other direction; this one may not be there.
        """
        te = frame.te
        row = self._rows[name_of(te, index), operand, "columnwise" if columnwise else "rowwise"]
        try:
            view = read(tensor, columnwise)
            if isinstance(view, str):
                if not ahead and (index, operand, columnwise) not in frame.observed:
                    self.unread.note(tensor, view, row)
                return None
            if columnwise and view.tile == view.shape:  # per tensor: codes and scale are those of rowwise, which
                tensor, columnwise = direction_of(tensor, True), False  # nobody reads where no gradient goes on
                row = self._rows[name_of(te, index), operand, "rowwise"]
            if view.codes.numel():  # else an expert without tokens
                self._observe(frame, index, tensor, operand, columnwise, offset, view, row)
            return view.shape[0]
        except Exception as error:  # noqa: BLE001 - counted, and told as an operand that was not read
            self._guard.swallow("te gemm", error)
            self.unread.note(tensor, f"fp8watch failed: {type(error).__name__}", row)
            return None

    def _observe(
        self,
        frame: Frame,
        index: int,
        tensor: Any,
        operand: str,
        columnwise: bool,
        offset: int | None,
        view: QuantizedView,
        row: int,
    ) -> None:
        if (index, operand, columnwise) in frame.observed:
            return
        frame.observed.add((index, operand, columnwise))
        held = direction_of(tensor, columnwise)
        quantizer = getattr(held, "_quantizer", None)
        power_2 = bool(getattr(quantizer, "force_pow_2_scales", False))
        eps = float(getattr(quantizer, "amax_epsilon", 0.0) or 0.0)
        bound = is_bound(quantizer, view)
        x = frame.operand(index, operand, view, offset)
        x = None if x is None else rotated(x, held, columnwise)
        if x is not None:
            stats = exact(x, view, power_2, eps, bound=bound, heavy=self._heavy)
            if self.turns is not None and self.turns.has(self.rows_of[id(frame.te)][0]):
                self.turns.operand(row, x, view, recipe_of(held, view.tile, bound), power_2, eps)
        else:
            stats = derived(view, power_2, eps, bound=bound)
            self._suspects[row] = num_suspect(view)
        if row not in self.numerics:
            self.numerics[row] = numerics_of(held, view, exact=x is not None)
        self._record(row, view.shape, stats)
