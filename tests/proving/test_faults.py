"""Each fault does what it says: right before it, wrong from its step on, right again when it is undone."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from proving import loop, tiny
from proving.faults import FAULTS, generators
from proving.faults._base import ERRORS
from proving.faults._kernel import KernelFault
from proving.faults._sites import WrongKernel
from proving.faults.corruption import flip_bit
from proving.training import SEVERITIES, Change, Fault, Training

import fp8watch
from fp8watch.kernels import cpu, reference
from fp8watch.kernels.backend import quantize_dequantize_both
from fp8watch.numerics.quantize_job import quantize_jobs
from fp8watch_server.detect.modes import SLUGS

NO_NUMBER = {"rank-of-other-version"}
"""Faults that change what is said of a run, and nothing that it computes."""
ONE_PLACE = {"sensitive-layers-quantised"}
"""Faults of a place that a training has once: there is one output head."""


@pytest.fixture(autouse=True)
def compute_path_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Faults act on what is computed; the observer would only take time."""
    monkeypatch.setenv("FP8WATCH_DISABLED", "stats")
    monkeypatch.setenv("FP8WATCH_SPOOL_DIR", str(tmp_path))


@cache
def _probe(kind: str) -> Training:
    torch.manual_seed(0)
    return tiny.KINDS[kind]()


def _drawn(name: str, seed: int = 0) -> tuple[str, Fault]:
    """The first place that the fault has, at its highest severity."""
    for severity in reversed(SEVERITIES):
        for kind in tiny.KINDS:
            fault = FAULTS[name].draw(np.random.default_rng(seed), _probe(kind), severity)
            if fault is not None:
                return kind, fault
    raise AssertionError(f"{name} has no place in any of {', '.join(tiny.KINDS)}")


Trace = list[tuple[Any, ...]]


def _train(kind: str, change: Change, recipe: Any = "") -> tuple[Trace, Trace]:
    """What each step gave, and what one more batch gives when the change is undone and the weights are the first again."""
    torch.manual_seed(0)
    change.before_build()
    t = tiny.KINDS[kind]()
    t.rank = getattr(change, "on", 0)
    t.recipe = recipe if recipe != "" else t.recipe
    first = {name: value.clone() for name, value in t.model.state_dict().items()}
    change.started(t)
    seams = loop.Seams(change)
    trace: Trace = []
    watch = _attached(t, change)
    try:
        for step in range(tiny.STEPS):
            if change.resumes and step == change.step:
                watch.detach()
                state = change.before_resume(t, loop.saved(t, None, step))
                loop.load(t, state)
                watch = _attached(t, change)
            trace.append(_step(t, step, seams))
        change.undo()
        t.model.load_state_dict(first)
        t.model.zero_grad()
        again = [_gradients(t, number) for number in (90, 91)]
    finally:
        change.undo()
        watch.detach()
    return trace, again


def _attached(t: Training, change: Change) -> Any:
    change.before_attach(t)
    watch = fp8watch.attach(t.model, recipe=t.recipe, **t.attach)
    change.attached(t, watch)
    return watch


def _step(t: Training, step: int, seams: loop.Seams) -> tuple[Any, ...]:
    loss, norm = loop.train_step(t, t.model, step, seams, None)
    logged = tuple(t.log(t, step).items()) if t.log is not None else ()
    weights = sum(float(p.detach().double().abs().sum()) for p in t.model.parameters())
    return repr(loss), repr(norm), repr(weights), logged


def _gradients(t: Training, number: int) -> tuple[str, ...]:
    torch.manual_seed(number)
    loss = t.loss(t.model, t.batch(number))
    loss.backward()
    return repr(loss.item()), *(repr(float(p.grad.norm())) for p in t.model.parameters() if p.grad is not None)


@cache
def _healthy(kind: str, recipe: str, resumed_at: int | None) -> tuple[Trace, Trace]:
    twin = Change()
    if resumed_at is not None:
        twin.resumes, twin.step = True, resumed_at
    return _train(kind, twin, recipe)


class TestOfEachFault:
    @pytest.mark.parametrize("name", sorted(set(FAULTS) - NO_NUMBER))
    def test_right_before_wrong_from_its_step_right_when_undone(self, name: str) -> None:
        kind, fault = _drawn(name)
        starts_over = fault.step == 0 or name in ("scales-as-exponents", "rollout-mismatch")
        needs = getattr(fault, "needs_recipe", "")
        recipe = needs if needs in ("delayed", "current") else tiny.KINDS[kind]().recipe
        trace, again = _train(kind, fault)
        healthy, healthy_again = _healthy(kind, recipe, fault.step if fault.resumes else None)
        if not starts_over:
            assert trace[: fault.step] == healthy[: fault.step]
        assert trace[fault.step :] != healthy[fault.step :]
        if recipe == "delayed":
            return  # a history of amax is never what it was
        if not fault.resumes and fault.step > 0 and not starts_over:
            assert again == healthy_again

    @pytest.mark.parametrize("name", sorted(FAULTS))
    def test_every_number_is_drawn_and_only_by_the_generator(self, name: str) -> None:
        kind, fault = _drawn(name)
        drawn = [
            FAULTS[name].draw(np.random.default_rng(seed), _probe(kind), fault.severity) for seed in (*range(12), 0)
        ]
        said = [repr((f.step, f.until, f.drawn)) for f in drawn if f is not None]
        assert said[0] == said[-1]
        assert len(set(said)) > 1 or name in ONE_PLACE

    @pytest.mark.parametrize("name", sorted(FAULTS))
    def test_says_what_is_expected_by_names_that_exist(self, name: str) -> None:
        kind, fault = _drawn(name)
        modules = dict(_probe(kind).model.named_modules())
        assert fault.expected.modes
        assert set(fault.expected.modes) <= set(SLUGS)
        assert set(fault.expected.modules or ()) <= set(modules)
        assert fault.expected.operand in (None, "input", "weight", "grad_output")
        assert fault.until is None or fault.until > fault.step
        assert FAULTS[name].__doc__


class TestTheCatalogue:
    def test_forty_faults_and_each_failure_mode_is_the_right_name_of_one(self) -> None:
        assert len(FAULTS) >= 40
        assert {_drawn(name, seed)[1].expected.modes[0] for name in FAULTS for seed in range(3)} == set(SLUGS) - {
            "two-jobs-one-run",  # no training does that by itself
            "expert-outlier",  # no fault of the catalogue is put into one expert of a parameter that holds them all
            "limit-ahead",  # nothing has failed: where a trend leads
        }

    def test_a_generator_is_one_file(self) -> None:
        for generator, names in generators().items():
            assert {FAULTS[name].__module__ for name in names} == {f"proving.faults.{generator}"}

    def test_a_training_that_only_watches_has_no_place_for_a_wrong_kernel(self) -> None:
        t = tiny.language()
        t.recipe = "observe"
        for name, cls in FAULTS.items():
            if issubclass(cls, KernelFault):
                drawn = [cls.draw(np.random.default_rng(i), t, s) for i in range(3) for s in SEVERITIES]
                assert drawn == [None] * len(drawn), name


def _kernels() -> list[str]:
    return [name for name, cls in FAULTS.items() if issubclass(cls, KernelFault) and name != "codes-nan"]


class TestWrongKernels:
    @pytest.mark.parametrize("name", _kernels())
    def test_statistics_are_those_of_the_sound_kernel_and_the_error_is_the_one_that_was_drawn(self, name: str) -> None:
        reached = []
        for seed in range(6):
            severity = "medium"
            drawn = (FAULTS[name].draw(np.random.default_rng(seed), _probe(k), severity) for k in ("language", "tied"))
            fault = next(f for f in drawn if f is not None)
            assert isinstance(fault, KernelFault)
            columnwise = True in fault.columnwise and fault.operand != "weight"
            tile = (128, 128) if fault.operand == "weight" else (128, 1) if columnwise else (1, 128)
            job = quantize_jobs(tile, "E4M3", name != "scales-as-exponents")[-1]
            kernel = WrongKernel(reference, lambda operand, fault=fault: fault.spoil("layers.1.attention.wq", operand))
            random = torch.Generator().manual_seed(seed)
            for _ in range(2):
                x = torch.randn(256, 256, generator=random) * torch.randn(256, 1, generator=random).exp()
                right, scale_inv, sound = reference.quantize_dequantize(x, job)
                wrong, wrong_scale_inv, stats = kernel.quantize_dequantize(x, job)
            assert sound is not None
            assert stats is not None
            np.testing.assert_equal(stats.summary(), sound.summary())
            assert torch.equal(wrong_scale_inv, scale_inv)
            error = float((wrong - right).norm() / right.norm())
            reached.append(error / fault.error)
        # what all rows together can reach is less for scales that are alike, and one row may already be more
        assert sum(0.6 < r < 1.7 for r in reached) >= 3, reached
        assert all(r > 0.02 for r in reached), reached

    def test_a_share_of_the_rows_is_as_wrong_as_was_asked(self) -> None:
        for severity in SEVERITIES:
            fault = FAULTS["codes-zeroed"].draw(np.random.default_rng(1), _probe("language"), severity)
            assert isinstance(fault, KernelFault)
            x = torch.randn(512, 128, generator=torch.Generator().manual_seed(0))
            out = fault.mixed(("m", False), x, torch.zeros_like(x))
            low, high = ERRORS[severity]
            assert low * 0.9 < float((out - x).norm() / x.norm()) < high * 1.1

    def test_both_directions_at_once_as_one_by_one(self) -> None:
        job = quantize_jobs((1, 128), "E4M3")[-1]
        x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
        seen: list[tuple[bool, float]] = []

        def spoil(operand: Any) -> torch.Tensor:
            seen.append((operand.columnwise, float((operand.values() - operand.right).abs().max())))
            return operand.right * (2.0 if operand.columnwise else 3.0)

        row, column = quantize_dequantize_both(WrongKernel(reference, spoil), x, job)
        assert seen == [(False, 0.0), (True, 0.0)]
        assert torch.equal(row[0], reference.quantize_dequantize(x, job)[0] * 3)
        assert torch.equal(column[0], reference.quantize_dequantize(x, job.transposed())[0] * 2)

    def test_no_short_cut_of_a_backend_goes_past_the_fault(self) -> None:
        """A function that only some backends have is found by having it: a wrong kernel has none of them."""
        plain = {"NAME", "probe", "quantize", "quantize_dequantize", "dequantize"}
        short_cuts = [n for n in dir(cpu) if not n.startswith("_") and n not in plain]
        assert "quantize_dequantize_both" in short_cuts
        assert [n for n in short_cuts if hasattr(WrongKernel(cpu, lambda operand: operand.right), n)] == []

    @pytest.mark.parametrize("name", ["codes-zeroed", "terms-dropped", "weight-scale-stale", "eps-too-large"])
    def test_it_bites_where_everything_is_observed_too(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("FP8WATCH_DISABLED")
        kind, fault = _drawn(name)
        trace, again = _train(kind, fault)
        healthy, healthy_again = _healthy(kind, tiny.KINDS[kind]().recipe, None)
        assert trace[: fault.step] == healthy[: fault.step]
        assert trace[fault.step :] != healthy[fault.step :]
        assert again == healthy_again

    def test_nan_codes_come_from_finite_operands(self) -> None:
        fault = FAULTS["codes-nan"].draw(np.random.default_rng(0), _probe("language"), "severe")
        assert isinstance(fault, KernelFault)
        x = torch.randn(32, 128)
        job = quantize_jobs((128, 1) if fault.columnwise == (True,) else (1, 128), "E4M3")[-1]
        kernel = WrongKernel(reference, lambda operand: fault.spoil("m", operand))
        out, _, stats = kernel.quantize_dequantize(x, job)
        assert bool(out.isnan().any())
        assert stats is not None
        assert int(stats.num_nan.sum()) == 0


class TestSizes:
    def test_a_flipped_bit_makes_the_size_that_was_drawn_where_a_bit_can(self) -> None:
        for times in (2.0, 30.0, 1e30):
            rng, x = np.random.default_rng(0), 0.02 * torch.randn(4096, generator=torch.Generator().manual_seed(0))
            right, amax = x.clone(), float(x.abs().max())
            index, before, after = flip_bit(x, times, rng)
            assert (x != right).nonzero().tolist() == [[index]]
            assert (float(right[index]), float(x[index])) == (before, after)
            flipped = int(right[index].view(torch.int32)) ^ int(x[index].view(torch.int32))
            assert flipped.bit_count() == 1
            assert abs(math.log2(abs(after) / (times * amax))) < (2 if times < 1e3 else 30)

    @pytest.mark.parametrize(("name", "attribute"), [("learning-rate-times", "times"), ("outlier-channel", "size")])
    def test_what_is_worse_is_larger(self, name: str, attribute: str) -> None:
        def size(severity: str, seed: int) -> float:
            fault = FAULTS[name].draw(np.random.default_rng(seed), _probe("language"), severity)
            return float(getattr(fault, attribute))

        sizes: dict[str, list[float]] = {s: [size(s, i) for i in range(10)] for s in SEVERITIES}
        assert max(sizes["mild"]) <= min(sizes["medium"])
        assert max(sizes["medium"]) <= min(sizes["severe"])


class TestRankOfOtherVersion:
    def test_only_what_is_said_of_that_rank_changes(self) -> None:
        kind, fault = _drawn("rank-of-other-version")
        t = tiny.KINDS[kind]()
        right: Callable[[], str] = lambda: str(torch.__version__)  # noqa: E731
        was = right()
        for rank in range(2):
            t.rank = rank
            fault.before_attach(t)
            assert (right() != was) == (rank == fault.drawn["rank"])
            fault.attached(t, None)
            assert right() == was
