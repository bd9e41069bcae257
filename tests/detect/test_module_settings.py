"""Settings of modules that a restart brings back otherwise."""

from __future__ import annotations

import pytest
from detect.trace import healthy

from fp8watch_agent.module_settings import SETTINGS_FACT, encode_settings
from fp8watch_server.detect.finding import Finding
from fp8watch_server.detect.registered_facts import Registry
from fp8watch_server.detect.sessions import SessionFacts
from fp8watch_server.detect.step_view import SiteTable
from fp8watch_server.incidents.explain import explain


def session_with(number: int, settings: dict[str, str], rank: int = 0, **facts: str) -> SessionFacts:
    facts = {"recipe": "observe", SETTINGS_FACT: encode_settings(settings), **facts}
    return SessionFacts(f"{number:032x}", rank, number, fingerprint="f" * 12, facts=facts)


BEFORE = {
    "Dropout.p": "0.1",
    "LayerNorm.eps": "1e-05",
    "Rotary.inv_freq": "32 × float32, 1 … 0.0001 (a)",
    "Old.scale": "2",
}
NOW = {"Dropout.p": "0", "LayerNorm.eps": "1e-05", "Rotary.inv_freq": "32 × float32, 1 … 2e-06 (b)", "New.scale": "3"}


def registered(*sessions: SessionFacts) -> list[Finding]:
    registry = Registry()
    for session in sessions:
        registry.add_session(session)
    return registry.findings(16, 0, sessions[-1].session, SiteTable())


def test_settings_of_modules_that_a_restart_brought_back_otherwise_are_information() -> None:
    [found] = registered(session_with(1, BEFORE), session_with(2, NOW))
    assert (found.mode, found.severity, found.verdict) == ("recipe-mismatch", "info", "shared")
    words = explain(found, healthy(3, 16, 1).facts)
    assert words.title == (
        "The model's settings are not those of the session before: Dropout.p 0.1 → 0; "
        "Rotary.inv_freq 32 × float32, 1 … 0.0001 (a) → 32 × float32, 1 … 2e-06 (b)"
    )
    assert "FP8 is not the cause" in words.cause
    assert words.fix[0]["text"] == "Give Dropout.p what it had: 0.1."
    assert {(e["field"], e["baseline"], e["value"]) for e in words.evidence} == {
        (name, BEFORE[name], NOW[name]) for name in ("Dropout.p", "Rotary.inv_freq")
    }


def test_settings_beside_changes_of_fp8_are_told_with_them() -> None:
    [found] = registered(session_with(1, BEFORE, margin="0"), session_with(2, NOW, margin="2"))
    assert (found.severity, found.verdict) == ("warning", "fp8")
    assert "margin 0 → 2" in explain(found, healthy(3, 16, 1).facts).title


@pytest.mark.parametrize("rank", [0, 1])
def test_settings_of_the_same_model_and_those_of_other_ranks_are_no_change(rank: int) -> None:
    """Stages of a pipeline hold other layers."""
    of_another = session_with(1, NOW, rank=1)
    assert registered(session_with(1, BEFORE), of_another if rank else session_with(2, BEFORE)) == []
