"""Collectives in fewer bits: sums, headroom and shares are those of ranks that send so."""

from __future__ import annotations

import copy
import json
import math

import pytest
import torch
from diagnose.small_models import Classifier, batch_of, trained
from torch import Tensor, nn

from fp8watch.diagnose import collectives_what_if
from fp8watch.diagnose.command import main as diagnose

RANKS = 4


class Weighted(nn.Module):
    """Its gradient is the batch: loss Σ weight · batch."""

    def __init__(self, n: int = 8) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(n))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


def sums(gradients: list[Tensor], **kwargs: object) -> dict[str, object]:
    found = collectives_what_if(Weighted(len(gradients[0])), gradients, ranks=len(gradients), **kwargs)  # type: ignore[arg-type]
    return {f.name: f for f in found.formats}


def test_a_sum_in_bf16_is_that_of_ranks_which_add_one_after_the_other_and_nothing_of_the_callers_changes() -> None:
    model, _ = trained(2, dim=32, layers=1)
    start, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    batches = [batch_of(50 + i, dim=32) for i in range(RANKS)]
    (found,) = collectives_what_if(model, iter(batches), ranks=RANKS, formats="bf16").formats
    signal = noise = 0.0
    summands: list[list[Tensor]] = []
    for batch in batches:
        copied = copy.deepcopy(model)
        copied.zero_grad(set_to_none=True)
        copied(*batch).backward()
        summands.append([p.grad / RANKS for p in copied.parameters()])  # type: ignore[operator]
    for parts in zip(*summands, strict=True):
        exact = torch.stack([p.double() for p in parts]).sum(0)
        total = parts[0].bfloat16()
        for part in parts[1:]:
            total = total + part.bfloat16()
        signal += float(exact.square().sum())
        noise += float((total.double() - exact).square().sum())
    assert found.sqnr_after_db == pytest.approx(10 * math.log10(signal / noise), abs=1e-6)
    assert found.sqnr_before_db > found.sqnr_after_db > 30
    assert all(torch.equal(model.state_dict()[k], v) for k, v in start.items())
    assert torch.equal(torch.get_rng_state(), random)
    assert all(p.grad is None for p in Classifier(32, 1).parameters())


def test_headroom_is_what_the_sum_takes_beyond_its_summands() -> None:
    same = torch.tensor([1.0, -2.0, 0.5, 4.0])
    model = Weighted(4)
    (alike,) = collectives_what_if(model, [same] * 8, ranks=8).headroom
    (against,) = collectives_what_if(model, [same, -same, same, -same], ranks=4).headroom
    assert (alike.parameter, alike.octaves) == ("weight", 3.0)
    assert against.octaves == -math.inf
    (half,) = collectives_what_if(model, [same, same, same * 0, same * 0], ranks=4).headroom
    assert half.octaves == 1.0


def test_without_room_for_the_sum_it_clips_and_with_it_small_gradients_are_flushed() -> None:
    g = torch.logspace(0, -7, 64, base=10.0)
    found = sums([g] * 16)
    assert found["e4m3-no-room"].clipped > 0.1  # type: ignore[attr-defined]
    assert found["e4m3"].clipped <= 1 / 64  # type: ignore[attr-defined]  # the largest, whose partial sums are rounded up
    assert found["e4m3"].flushed > found["e4m3-no-room"].flushed > 0  # type: ignore[attr-defined]
    assert found["e5m2"].flushed < found["e4m3"].flushed  # type: ignore[attr-defined]
    assert found["bf16"].flushed == 0  # type: ignore[attr-defined]
    assert found["e4m3"].sqnr_after_db > found["e4m3-no-room"].sqnr_after_db  # type: ignore[attr-defined]
    assert sums([torch.full((4,), 1e-9)] * 2)["fp16"].flushed == 1.0  # type: ignore[attr-defined]
    assert sums([torch.full((4,), 1e7)] * 2)["fp16"].sqnr_after_db == -math.inf  # type: ignore[attr-defined]


class Experts(nn.Module):
    """Two experts, of which the second sees small tokens beside a huge one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(128, 128, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        spoilt = torch.cat((x[:, :1] * 1e7, x[:, 1:]), 1)
        return (self.experts[0](x) + self.experts[1](spoilt)).square().mean()


def test_what_experts_are_sent_is_cast_by_tiles_and_others_are_chosen_by_name() -> None:
    torch.manual_seed(0)
    batches = [torch.randn(8, 128) for _ in range(2)]
    found = collectives_what_if(Experts(), batches, ranks=2).sent
    of = {(s.module, s.way, s.format): s for s in found}
    assert {s.module for s in found} == {"experts.0", "experts.1"}
    assert of["experts.0", "dispatch", "e4m3"].sqnr_db == pytest.approx(31.5, abs=1.5)
    assert of["experts.0", "dispatch", "e4m3"].flushed == 0
    assert of["experts.1", "dispatch", "e4m3"].flushed > 0.5
    assert of["experts.1", "dispatch", "bf16"].flushed == 0
    assert {s.way for s in found} == {"dispatch", "combine"}
    assert collectives_what_if(Experts(), batches, ranks=2, sent=lambda name: False).sent == ()


def test_arguments_that_cannot_work_are_refused_by_name() -> None:
    model, batch = Weighted(), torch.ones(8)
    for asked, words in (
        ({"batches": [batch], "ranks": 2}, "one for each of ranks=2"),
        ({"batches": [batch], "ranks": 1}, "ranks=1"),
        ({"batches": [batch] * 2, "ranks": 2, "formats": ["e9"]}, "'e9' is unknown"),
        ({"batches": [batch * 0] * 2, "ranks": 2}, "nothing is reduced"),
        (
            {"batches": [batch, batch * float("inf")], "ranks": 2},
            "gradient of .* is not finite on rank 1, before it is reduced",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            collectives_what_if(model, **asked)  # type: ignore[arg-type]


def subject() -> tuple[nn.Module, object]:
    """For the command."""
    return Weighted(), iter([torch.arange(8.0) + i for i in range(9)])


def one_batch() -> tuple[nn.Module, object]:
    """For the command."""
    return Weighted(), torch.ones(8)


def test_the_command_says_it_as_a_table_as_json_and_as_a_picture(
    tmp_path: object, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "sum.svg"  # type: ignore[operator]
    target = f"{__name__}:subject"
    assert diagnose(["collectives", target, "--ranks", "4", "--svg", str(picture)]) == 0
    said = capsys.readouterr().out
    assert "The sum over 4 ranks takes 1." in said
    assert "2.0 is the most it can" in said
    assert "e4m3-no-room" in picture.read_text()
    assert diagnose(["collectives", target, "--format", "bf16", "--json"]) == 0
    (in_bf16,) = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["formats"]  # JSON has no Infinity
    assert (in_bf16["name"], in_bf16["sqnr_before_db"]) == ("bf16", "inf")
    assert diagnose(["collectives", f"{__name__}:one_batch"]) == 2
    assert "each rank has a batch of its own" in capsys.readouterr().err
