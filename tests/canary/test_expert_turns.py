"""Experts that compute in FP8 have turns: another one in each, as much of it as of a Linear, and a kernel that is wrong in one
expert is told with its number."""

from __future__ import annotations

import pytest
import torch
from canary.faults import break_site
from support.own_models import E, Experts, K
from torch import nn

from fp8watch.kernels import emulated_gemm
from fp8watch.observer.expert_turns import ExpertTurns
from fp8watch_agent.record import Measured
from fp8watch_server.detect.modes.kernel_output_fault.words import words as words_of_kernel
from fp8watch_server.detect.modes.quantiser_fault.words import words as words_of_quantiser

TOKENS, WRONG, STEPS = 400, 2, 6
"""Of three experts that get tokens, the last; the fourth gets none."""


class Model(nn.Module):
    """Experts, and nothing else; returns a 0-d loss."""

    def __init__(self, way="grouped"):
        super().__init__()
        self.experts = Experts(way=way)

    def forward(self, x):
        ids = torch.arange(len(x)) * 7 % (E - 1)
        return self.experts(x[:, :K].clone().requires_grad_(), ids).pow(2).mean()


def rows_of(expert, tile=1):
    """Rows of an expert in the operand, each expert padded to whole tiles."""
    sizes = torch.bincount(torch.arange(TOKENS) * 7 % (E - 1), minlength=E).tolist()
    starts = [sum(-(-n // tile) * tile for n in sizes[:e]) for e in range(E)]
    return starts[expert], starts[expert] + sizes[expert]


def wrong_rows(start, end):
    """Codes of these rows stand where other elements are."""

    def fault(data, scale_inv):
        out = data.clone()
        part = out[start:end].view(torch.uint8) if data.dtype.itemsize == 1 else out[start:end]
        part.copy_(part.roll(16, 1))
        return out, scale_inv

    return fault


def found_by(line, mode):
    return [f for f in line.findings if f.mode == mode and not f.extra.get("consequence")]


@pytest.mark.parametrize("way", ["grouped", "loop"])
@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8"])
def test_healthy_experts_have_turns_and_nothing_is_said(train, way, recipe):
    line, _ = train(STEPS, model=Model(way), tokens=TOKENS, recipe=recipe, share=1e6, overhead_budget=None)
    assert line.findings == []
    assert not any(name.startswith("checked_") for logs in line.logs for name in logs)
    looked = set()
    for rows in line.rows:
        for site, row in rows.items():
            s = line.sites[site]
            if s.module.startswith("experts.") and row["measured"] & (Measured.QUANTISER | Measured.GEMM):
                looked.add((s.module, s.operand, s.direction))
                blocks = s.operand == "weight" and recipe == "blockwise"
                assert 0 < row["num_checked_tiles"] <= (4 if blocks else 33), "as many as of a Linear"
    own = {(s.module, s.operand, s.direction) for s in line.sites.values() if s.module.startswith("experts.")}
    assert looked == {key for key in own if key[1] != "output"}


@pytest.mark.parametrize(
    ("operand", "columnwise", "tile"),
    [
        ("input", False, 1),
        ("input", True, 128),
        ("grad_output", False, 1),
        ("grad_output", True, 128),
        ("weight", False, 128),
    ],
)
def test_codes_that_are_wrong_in_one_expert_are_told_with_it(train, operand, columnwise, tile):
    start, end = (WRONG * 128, WRONG * 128 + 96) if operand == "weight" else rows_of(WRONG, tile)

    def before(watch):
        break_site(watch, "experts.up", operand, columnwise, wrong_rows(start, end))

    line, _ = train(8, model=Model(), tokens=TOKENS, share=1e6, overhead_budget=None, before=before)
    found = found_by(line, "quantiser-fault")
    site = line.sites[found[0].site]
    assert (site.module, site.operand) == ("experts.up", operand)
    assert site.direction == ("columnwise" if columnwise else "rowwise")
    assert {f.extra.get("expert") for f in found} == {WRONG}
    assert start // tile <= found[0].tile[0] < -(-end // tile)
    assert f", expert {WRONG}, tile ({found[0].tile[0]}, 0)" in words_of_quantiser(found[0], site)[0]
    turns = [i for i, rows in enumerate(line.rows) if rows[found[0].site]["measured"] & Measured.QUANTISER]
    assert found[0].step == turns[WRONG], "in the turn in which the expert was looked at"


@pytest.mark.parametrize("gemm", ["fprop", "dgrad", "wgrad"])
@pytest.mark.parametrize("way", ["grouped", "loop"])
def test_a_product_that_is_wrong_in_one_expert_is_told_with_it(train, monkeypatch, gemm, way):
    right, num = getattr(emulated_gemm, gemm), [0]

    def wrong(*args):
        out, of = right(*args), len(args[0])
        shape = tuple(out.shape)
        if of == TOKENS // 3 + (TOKENS % 3 > 0) and shape in ((of, 96), (of, K), (96, K)):  # expert 0 has a token more
            num[0] += 1
            out = out.clone()
            out[::2] = out.flip(0)[::2]
        return out

    monkeypatch.setattr(emulated_gemm, gemm, wrong)
    line, _ = train(4, model=Model(way), tokens=TOKENS, share=1e6, overhead_budget=None)
    assert num[0]
    found = found_by(line, "kernel-output-fault")
    assert found
    site = line.sites[found[0].site]
    assert site.module.startswith("experts.")
    assert site.gemm == gemm
    assert {f.extra.get("expert") for f in found} == {0}
    assert f"{site.module}, expert 0" in words_of_kernel(found[0], site)[0]


def test_a_gradient_that_nobody_wrote_is_told_of_an_expert_without_tokens(train, monkeypatch):
    from fp8watch.kernels import emulated_grouped

    right = emulated_grouped.wgrad

    def garbage(grad, x, groups, dtype):
        out = right(grad, x, groups, dtype)
        out[E - 1] = 1.0
        return out

    monkeypatch.setattr(emulated_grouped, "wgrad", garbage)
    line, _ = train(8, model=Model(), tokens=TOKENS, share=1e6, overhead_budget=None)
    found = found_by(line, "kernel-output-fault")
    assert {f.extra.get("expert") for f in found} == {E - 1}
    assert line.sites[found[0].site].gemm == "wgrad"


def test_turns_of_one_module_go_over_all_its_experts_whatever_the_others_do():
    turns = ExpertTurns()
    order = [[turns.expert(first, 4 * i + first, 4) for first in range(4)] for i in range(4)]
    assert order == [[i] * 4 for i in range(4)]
    assert turns.expert(0, 12, 4) == 3, "asked again in one turn it is the same"
