"""Where nothing was measured, no sentence says what was: each mode is put into words without any evidence."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from detect.healthy_run import Run

from fp8watch_agent.fault_names import KINDS, SETTINGS
from fp8watch_server.detect.finding import Finding, Verdict
from fp8watch_server.detect.modes import SLUGS
from fp8watch_server.incidents.explain import explain

CLAIMS = (
    "ordinary size",
    "quantise well",
    "healthy.",
    "healthy,",
    "invariant holds",
    "is finite",
    "operands are finite",
    "innocent",
    "stands",
    ", alone",
    "data changed",
    "batch was unlike",
    "no optimizer does that",
    "never healthy",
    "bf16 does the same",
    "an update of an earlier step wrote it",
)
EXTRA: dict[str, list[dict[str, Any]]] = {
    "bad-batch": [{}, {"shift": True}, {"cut": 12}, {"level": True, "shift": True}],
    "outlier-growth": [{}, {"leap": True}],
    "optimizer-divergence": [
        {},
        {"by_loss": True, "lr_jump": (2e-3, 6e-2)},
        {"lr_jump": (2e-3, 6e-2)},
        {"kind": "clipping-lost"},
        {"kind": "second-moments"},
        {"kind": "logits", "lr_jump": (2e-3, 6e-2)},
        {"kind": "shrinking", "what": "weights"},
        {"kind": "shrinking", "what": "inputs"},
    ],
    "attention-logit-growth": [{}, {"bound": True}],
    "chronic-quantization-noise": [{}, {"by": "lost"}, {"by": "underflow"}, {"onset": 3, "by": "drop"}],
    "dead-layer": [
        {},
        *({"which": w} for w in ("both", "input", "gradient", "not-called", "no-gradient", "frozen", "starved")),
    ],
    "gradient-underflow": [{}, {"statistical": True}],
    "scale-collapse": [{}, {"grad_scaler": True}],
    "kernel-output-fault": [{}, {"wrong_output": True}],
    "quantiser-fault": [{}, *({"why": kind} for kind in KINDS)],
    "recipe-mismatch": [{}, *({"why": kind, "kind": "in-effect"} for kind in SETTINGS)],
    "scalar-shift": [{}, {"why": "fall"}, {"why": "band", "name": "kl"}, {"why": "shift", "name": "kl"}],
    "silent-data-corruption": [
        {},
        {"written": (2, 40, False)},
        {"by_hash": True, "odd_ranks": [3]},
        {"kind": "no-replicas"},
    ],
}
CASES = [(mode, extra) for mode in SLUGS for extra in EXTRA.get(mode, [{}])]


def said(mode: str, extra: dict[str, Any], operand: str | None, verdict: Verdict = "unknown") -> str:
    run = Run()
    site = None if operand is None else run.sites[run.index("layers.1.mlp.down_proj", operand)].id
    finding = Finding(
        mode=mode, severity="warning", step=10, rank=0, site=site, tile=None, element=None, evidence=(),
        verdict=verdict, rank_in_flow=0, extra=extra,
    )  # fmt: skip
    words = explain(finding, run.facts)
    return " ".join([words.title, words.cause, *(f["text"] for f in words.fix)]).lower()


@pytest.mark.parametrize(("mode", "extra"), CASES, ids=[f"{m}-{'-'.join(e)}" for m, e in CASES])
def test_no_claim_is_made_about_what_was_not_measured(mode: str, extra: dict[str, Any]) -> None:
    for operand in ("input", "weight", "grad_output", None):
        text = said(mode, extra, operand)
        assert [claim for claim in CLAIMS if claim in text] == [], operand
    assert "not fp8" not in text
    assert "verdict: unknown" in text


def test_every_claim_of_the_list_is_one_that_some_sentence_makes_when_it_is_measured() -> None:
    """A list of phrases that nobody says any more would let every sentence pass."""
    measured = {
        "operands_seen": True, "operand_counted": True, "gradient_seen": True, "invariant_held": True, "stands": True,
    }  # fmt: skip
    texts = [
        said(mode, {**extra, **measured}, operand, "shared")
        for (mode, extra), operand in itertools.product(CASES, ("input", "weight"))
    ]
    spoken = [c for c in CLAIMS if any(c in text for text in texts)]
    assert {
        "invariant holds",
        "is finite",
        "operands are finite",
        "innocent",
        "stands",
        "no optimizer does that",
    } <= set(spoken)
    assert "bf16 does the same" in spoken
