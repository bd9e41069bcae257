"""Each unseen fault changes what its text says, by as much, and leaves the rest."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from proving import tiny
from proving.families import parts
from proving.faults._kernel import KernelFault
from proving.faults._sites import Operand, WrongKernel
from proving.faults.products import ProductFault
from proving.faults.ranges import _Captured
from proving.placed import steps_of, with_fault
from proving.training import SEVERITIES, Fault
from torch import Tensor

from fp8watch.kernels import reference
from fp8watch.numerics.quantize_job import quantize_jobs


def _uneven(rows: int = 64, columns: int = 256) -> Tensor:
    """Tiles of 128 of unlike size."""
    random = torch.Generator().manual_seed(0)
    sizes = torch.randn(rows, columns // 128, generator=random).mul(2).exp().repeat_interleave(128, 1)
    return sizes * torch.randn(rows, columns, generator=random)


def _read(fault: KernelFault, x: Tensor, fmt: str = "E4M3", power_2: bool = True) -> tuple[Tensor, Tensor]:
    """What a GEMM reads of x, wrong and right."""
    job = quantize_jobs((1, 128), fmt, power_2)[-1]
    kernel = WrongKernel(reference, lambda operand: fault.spoil("m", operand))
    return kernel.quantize_dequantize(x, job)[0], reference.quantize_dequantize(x, job)[0]


class TestEpilogues:
    @pytest.mark.parametrize("way", ["first", "halves"])
    def test_a_block_of_k_takes_the_scale_of_another(self, way: str) -> None:
        _, fault = with_fault("scales-of-other-k-block")
        fault.way = way
        x, job = _uneven(8, 384), quantize_jobs((1, 128), "E4M3")[-1]
        codes, scale_inv, _ = reference.quantize(x, job)
        operand = Operand(x, codes.float(), codes.view(torch.uint8), scale_inv, job, False, reference)
        got = fault.wrong("m", operand)
        block = {"first": [0] * 384, "halves": [min(i // 64, 2) for i in range(384)]}[way]
        assert torch.equal(got, codes.float() * scale_inv[:, torch.tensor(block)])

    def test_noise_is_as_large_as_was_drawn_and_has_no_bias(self) -> None:
        for severity in SEVERITIES:
            _, fault = with_fault("rounding-noise-shifted", severity=severity)
            fault.columnwise = (False,)
            wrong, right = _read(fault, torch.randn(256, 256, generator=torch.Generator().manual_seed(0)))
            error = float((wrong - right).norm() / right.norm())
            assert 0.8 * fault.error < error < 1.3 * fault.error, severity
            assert abs(float((wrong - right).mean())) < 0.02 * float(right.abs().mean())

    def test_a_bias_is_added_for_each_split(self) -> None:
        for severity in SEVERITIES:
            _, fault = with_fault("bias-of-every-split", "images", severity)
            random = torch.Generator().manual_seed(0)
            a, b = torch.randn(16, 32, generator=random), torch.randn(32, 32, generator=random)
            bias = torch.randn(32, generator=random)
            out = a @ b + bias
            extra = fault._added("m", bias, out, a, b) - out
            num_splits, num_columns = fault.found["m"]
            assert torch.allclose(
                extra[:, :num_columns], ((num_splits - 1) * bias[:num_columns]).expand(16, -1), atol=1e-4
            )
            assert float(extra[:, num_columns:].abs().sum()) == 0
            assert 0.3 * fault.error < fault.drawn["error"] < 1.7 * fault.error + 0.1, severity

    @pytest.mark.parametrize("name", ["output-fragments-transposed", "store-overhangs"])
    def test_a_product_is_as_wrong_as_was_drawn(self, name: str) -> None:
        random = torch.Generator().manual_seed(0)
        a, b = torch.randn(512, 128, generator=random), torch.randn(128, 64, generator=random)
        for severity in SEVERITIES:
            _, fault = with_fault(name, severity=severity)
            assert isinstance(fault, ProductFault)
            error = float((fault.wrong(a @ b, a, b) - a @ b).norm() / (a @ b).norm())
            assert 0.6 * fault.error < error < 1.4 * fault.error + 0.1, severity

    def test_fragments_leave_transposed_and_the_rest_stays(self) -> None:
        _, fault = with_fault("output-fragments-transposed", severity="medium")
        out = torch.randn(64, 24, generator=torch.Generator().manual_seed(0))
        got = fault.wrong(out, out, out)
        bands = [(out[i : i + 8], got[i : i + 8]) for i in range(0, 64, 8)]
        wrong = [pair for pair in bands if not torch.equal(*pair)]
        assert 0 < len(wrong) < len(bands)
        for right, found in wrong:
            assert all(torch.equal(found[:, c : c + 8], right[:, c : c + 8].t()) for c in (0, 8, 16))

    def test_what_hangs_over_lands_in_the_first_columns_of_the_rows_below(self) -> None:
        _, fault = with_fault("store-overhangs", severity="medium")
        a, b = torch.randn(64, 32), torch.randn(32, 48)
        hit = fault.wrong(a @ b, a, b) != a @ b
        assert not hit[0].any()
        columns = hit.any(0).nonzero().flatten().tolist()
        assert columns == list(range(len(columns)))
        assert 0 < len(columns) < 48


class TestRanges:
    def test_the_smallest_tiles_stand_for_nothing(self) -> None:
        for severity in SEVERITIES:
            _, fault = with_fault("scales-flushed", severity=severity)
            fault.columnwise = (False,)
            wrong, right = _read(fault, _uneven(256))
            tiles, kept = right.unflatten(1, (2, 128)), wrong.unflatten(1, (2, 128))
            lost = (kept == 0).all(2)
            assert torch.equal(kept[~lost], tiles[~lost])
            assert (
                float(tiles[lost].abs().max()) <= float(tiles[~lost].abs().amax(1).min()) * 1.1 if (~lost).any() else 1
            )
            assert float((wrong - right).norm() / right.norm()) == pytest.approx(fault.error, rel=0.3)

    def test_nothing_is_above_the_other_maximum(self) -> None:
        _, fault = with_fault("clamped-at-other-maximum", severity="medium")
        fault.columnwise, fault.error = (False,), 10.0
        wrong, right = _read(fault, torch.randn(64, 256, generator=torch.Generator().manual_seed(0)))
        scale_inv = reference.quantize(right, quantize_jobs((1, 128), "E4M3")[-1])[1].repeat_interleave(128, 1)
        assert float((wrong / scale_inv).abs().max()) <= fault.part * 448 * 1.001
        low = (right / scale_inv).abs() < fault.part * 448
        assert torch.equal(wrong[low], right[low])
        assert not low.all()

    def test_scales_of_the_first_pass_stay(self) -> None:
        for severity in SEVERITIES:
            _, fault = with_fault("scales-of-captured-graph", severity=severity)
            kernel, job = _Captured(reference, fault), quantize_jobs((1, 128), "E4M3")[-1]
            _, first, _ = kernel.quantize_dequantize(_uneven(), job)
            _, later, stats = kernel.quantize_dequantize(100 * _uneven(), job)
            assert torch.equal(first, later)
            assert stats is not None
            assert fault.drawn["error"] == pytest.approx(fault.error, rel=0.4, abs=0.03), severity

    def test_an_amax_says_no_more_than_the_scale_lets_through(self) -> None:
        from fp8watch.numerics.formats import fp8_format
        from fp8watch.quantize.per_tensor import DelayedScale
        from fp8watch.recipe.spec import AmaxHistory

        state = DelayedScale(fp8_format("E4M3"), AmaxHistory())
        state.record(torch.tensor([2.0]))
        state.roll()
        scale = float(state.scale)
        t, fault = with_fault("amax-after-the-cast", "delayed")
        module = t.model.get_submodule(fault.module)

        class Quantizer:
            pass

        quantizer = Quantizer()
        quantizer.state = state  # type: ignore[attr-defined]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("proving.faults.ranges.quantizers", lambda m, operand: [quantizer])
            fault.begin(t)
        for _ in range(4):
            state.record(torch.tensor([1000.0]))
            state.roll()
        assert float(state.scale) == pytest.approx(scale)
        x = torch.ones(2, module.in_features)
        seen: list[float] = []
        module.register_forward_pre_hook(lambda m, args: seen.append(float(args[0].max())))
        for _ in range(60):
            module(x)
        assert seen[0] > 1
        assert seen[-1] == pytest.approx(fault.size)
        fault.undo()
        state.record(torch.tensor([1000.0]))
        state.roll()
        assert float(state.scale) < scale / 100


class TestArithmetic:
    def test_rows_that_overflow_are_zero_or_the_bias(self) -> None:
        t, fault = with_fault("norm-overflows-in-half", "language", "medium")
        fault.modules = ["norm"]
        fault.begin(t)
        x = torch.randn(4, 50, tiny.DIM) * torch.rand(4, 50, 1).exp()
        got = t.model.get_submodule("norm")(x)
        fault.undo()
        right = t.model.get_submodule("norm")(x)
        lost = (got == 0).all(-1)
        assert float(lost.float().mean()) == pytest.approx(fault.share, abs=0.02)
        assert torch.equal(got[~lost], right[~lost])
        assert float(x[lost].square().sum(-1).min()) > float(x[~lost].square().sum(-1).max())

    def test_neighbours_are_turned_alike(self) -> None:
        for severity, alike in (("mild", {2}), ("medium", {4, 8}), ("severe", {16, 32, 64})):
            t, fault = with_fault("positions-rounded", "language", severity)
            assert fault.alike in alike
            sound = parts.rotate
            fault.begin(t)
            try:
                turned = parts.rotate(torch.ones(1, 1, 80, 8))[0, 0]
            finally:
                fault.undo()
            assert parts.rotate is sound
            assert len({tuple(row.tolist()) for row in turned}) <= 80 // fault.alike + 2

    def test_queries_read_another_groups_keys(self) -> None:
        t, fault = with_fault("kv-heads-tiled", severity="medium")
        q, k, v = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8)
        sound = F.scaled_dot_product_attention
        fault.begin(t)
        try:
            grouped = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            repeated = F.scaled_dot_product_attention(q, *(x.repeat_interleave(2, 1) for x in (k, v)), is_causal=True)
        finally:
            fault.undo()
        wanted = sound(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1), is_causal=True)
        assert F.scaled_dot_product_attention is sound
        assert torch.allclose(grouped, wanted, atol=1e-5)
        assert torch.allclose(repeated, wanted, atol=1e-5)

    def test_one_layer_alone_where_it_is_mild(self) -> None:
        t, fault = with_fault("kv-heads-tiled", severity="mild")
        q, k, v = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8)
        right = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        fault.begin(t)
        try:
            same = [
                torch.allclose(F.scaled_dot_product_attention(q, k, v, enable_gqa=True), right, atol=1e-5)
                for _ in range(4)
            ]
        finally:
            fault.undo()
        assert same == [i % 2 not in fault.layers for i in range(4)]


class TestReductions:
    @pytest.mark.parametrize("left", ["first", "last"])
    def test_one_micro_batch_is_all_that_is_left(self, left: str) -> None:
        t, fault = with_fault("micro-batch-lost")
        fault.left, fault.step, t.clip_norm = left, 0, None
        name = fault.modules[0]
        loss = t.loss(t.model, t.batch(0 if left == "first" else t.accumulate - 1)) / t.accumulate
        loss.backward()
        weight, norm = t.model.get_submodule(name).weight, t.model.get_submodule("norm").weight
        assert weight.grad is not None
        assert norm.grad is not None
        wanted, of_norm = weight.grad.clone(), norm.grad.clone()
        steps_of(t, 0, 1, fault)
        assert torch.allclose(weight.grad, wanted, atol=1e-7)
        assert not torch.allclose(norm.grad, of_norm, atol=1e-7)

    def test_small_gradients_are_zero_when_they_arrive(self) -> None:
        for severity in SEVERITIES:
            t, fault = with_fault("gradients-flushed-in-transit", "language", severity)
            fault.step, t.clip_norm = 0, None
            steps_of(t, 0, 1, fault)
            gradients = torch.cat([p.grad.flatten() for p in t.model.parameters() if p.grad is not None])
            # what is at least half of the limit is rounded up to it
            assert 0.4 * fault.share < float((gradients == 0).float().mean()) < min(1.0, fault.share + 0.35)
            sizes = gradients.abs().unique()
            assert torch.allclose(sizes / fault.limit, (sizes / fault.limit).round(), atol=1e-3)

    def test_the_norm_is_too_large_and_more_is_clipped(self) -> None:
        norms, left = [], []
        for active in (False, True):
            t, fault = with_fault("norm-counts-replicas", "language")
            t.clip_norm, fault.step = 1e-3, 0 if active else 9
            norms.append(steps_of(t, 0, 1, fault)[0][1])
            fault.undo()
            left.append(
                math.sqrt(sum(float(p.grad.square().sum()) for p in t.model.parameters() if p.grad is not None))
            )
        assert norms[1] == pytest.approx(fault.factor * norms[0], rel=1e-4)
        assert left == pytest.approx([1e-3, 1e-3 / fault.factor], rel=1e-3)

    def test_the_two_parts_of_a_tied_gradient_are_one_gradient(self) -> None:
        got = {}
        for of in ("", "table", "head"):
            t, fault = with_fault("tied-gradient-part")
            fault.of, fault.share = of, 1.0
            if of:
                fault.begin(t)
            t.loss(t.model, t.batch(0)).backward()
            fault.undo()
            got[of] = [p.grad.clone() for p in t.model.parameters() if p.grad is not None]
        names = [name for name, _ in t.model.named_parameters()]
        at = names.index("tok_embeddings.weight")
        assert torch.allclose(got["table"][at] + got["head"][at], got[""][at], atol=1e-6)
        assert float(got["table"][at].abs().sum()) > 0
        assert float(got["head"][at].abs().sum()) > 0
        for i in (i for i in range(len(names)) if i != at):
            assert torch.allclose(got["head"][i], got[""][i], atol=1e-6)
            assert torch.allclose(got["table"][i], got[""][i], atol=1e-6)


class TestStates:
    def test_the_average_takes_the_place_of_the_weights(self) -> None:
        t, fault = with_fault("average-left-in-place", "language")
        fault.step, fault.every, fault.reach = 4, 3, 2.0
        weight, course = t.model.get_submodule("output").weight, []
        average = weight.detach().clone()
        for step in range(8):
            average.lerp_(weight.detach(), 0.5)
            was = weight.detach().clone()
            fault.before_step(t, step)
            course.append((torch.equal(weight, was), torch.allclose(weight, average)))
            steps_of(t, step, step + 1, Fault(step=99, severity="", expected=fault.expected))
        assert [kept for kept, _ in course] == [True] * 4 + [False, True, True, False]
        assert course[4][1]

    def test_weights_grow_by_what_was_drawn(self) -> None:
        for severity in SEVERITIES:
            t, fault = with_fault("remainders-misread", "language", severity)
            weight = t.model.get_submodule("output").weight
            before = weight.detach().clone()
            fault.step = 0
            fault.after_update(t, 0)
            grown = float(weight.detach().abs().sum() / before.abs().sum()) - 1
            assert grown == pytest.approx(fault.growth, rel=0.3)
            assert torch.equal(weight.sign(), before.sign())


class TestSamples:
    def test_targets_are_those_of_other_rows(self) -> None:
        t, fault = with_fault("targets-of-other-rows", "images", "medium")
        batch = t.batch(0)
        got = fault.on_batch(t, fault.step, batch)
        assert torch.equal(got["pixels"], batch["pixels"])
        assert sorted(got["labels"].tolist()) == sorted(batch["labels"].tolist())
        assert not torch.equal(got["labels"], batch["labels"])

    def test_channels_are_stuck_at_one_value_and_are_the_same_ones_each_time(self) -> None:
        t, fault = with_fault("channels-stuck", "images", "medium")
        stuck = []
        for number in range(3):
            batch = t.batch(number)
            got = fault.on_batch(t, fault.step, batch)["pixels"]
            changed = (got != batch["pixels"]).flatten(0, 1).any(0)
            assert len(got[..., changed].abs().unique()) == 1
            assert float(got.abs().max()) == pytest.approx(
                max(1.0, fault.size) * float(batch["pixels"].abs().max()), rel=1e-3
            )
            stuck.append(changed.tolist())
        assert stuck[0] == stuck[1] == stuck[2]
        assert 0 < sum(stuck[0]) < len(stuck[0])

    def test_prompts_are_scored_by_what_comes_next_and_padding_is_not(self) -> None:
        t, fault = with_fault("prompts-scored")
        fault.share = 1.0
        batch = t.batch(0)
        got = fault.on_batch(t, fault.step, batch)["labels"]
        assert torch.equal(got[:, :3], batch["input_ids"][:, 1:4])
        assert torch.equal(got[:, 3:][batch["labels"][:, 3:] >= 0], batch["labels"][:, 3:][batch["labels"][:, 3:] >= 0])
        assert (got[batch["attention_mask"] == 0] == -100).all()

    def test_ids_are_others_and_none_is_lost(self) -> None:
        for severity in SEVERITIES:
            t, fault = with_fault("ids-of-other-tokenizer", "language", severity)
            fault.begin(t)
            assert sorted(fault.table.tolist()) == list(range(tiny.VOCAB))
            batches = [t.batch(number) for number in range(8)]
            got = [fault.on_batch(t, fault.step, batch) for batch in batches]
            moved = torch.cat([(g["input_ids"] != b["input_ids"]).flatten() for g, b in zip(got, batches, strict=True)])
            assert float(moved.float().mean()) == pytest.approx(fault.share, abs=0.12)
            assert all(torch.equal(g["labels"] < 0, b["labels"] < 0) for g, b in zip(got, batches, strict=True))
