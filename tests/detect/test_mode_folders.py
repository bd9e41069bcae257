"""A mode is a folder that registers itself, and what is written with names, or hangs on an order, stays as it is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from detect.saved_state import FILE, PER_BATCH, SAVED_AFTER, engine_of, names_in, run

import fp8watch_server.detect.modes as registry
from fp8watch_server.detect import precedence
from fp8watch_server.detect.engine import DetectionEngine
from fp8watch_server.detect.modes import DETECTORS, MODE_BY_SLUG, MODES, SLUGS, STEP_CHECKS, folder_of
from fp8watch_server.detect.state import _CLASSES
from fp8watch_server.detect.thresholds import TABLE

FOLDERS = Path(registry.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "detection.md"

ASKED = [
    "Divergence", "Delayed", "Collapse", "AttentionLogits", "Corruption", "Outliers", "Underflow", "Dying",
    "DeadLayers", "Noise", "LossJumps",
]  # fmt: skip

THRESHOLDS = """
    warmup_steps after_lr_warmup_steps min_baseline_steps close_after_steps late_rank_s heartbeat_s missing_heartbeats
    input_floor_octaves weight_floor_octaves grad_output_floor_octaves
    divergence_rate_octaves divergence_total_octaves divergence_layers
    outlier_weight_octaves outlier_input_octaves outlier_leap_octaves outlier_kurtosis_octaves outlier_layers
    attention_logit_warning attention_logit_critical attention_logit_rate_octaves attention_logit_floor
    clip_depth clip_depth_grad_output clip_sqnr_db frozen_clip_depth frozen_steps
    collapse_octaves collapse_window_steps collapse_halvings underflow_points underflow_alarm_points
    chronic_sqnr_e4m3_db chronic_sqnr_e5m2_db chronic_underflow sqnr_drop_db
    dying_log2_amax dying_fall_octaves dead_octaves loss_jump_sigma loss_jump_min grad_norm_jump recover_steps
    corruption_jump_octaves gemm_error gemm_gain gemm_wrong resume_scale_octaves destroyed_sqnr_db
"""

SAVED = """
    Agreement Assembly AttentionLogits Baseline Baselines Change Collapse Corruption DeadLayers Delayed Divergence Dying
    Evidence Finding Latch LossJumps Noise Notice Outliers Registry ScaleHistory Schedule SessionFacts SiteFacts Statistics
    Stream Underflow ZeroTiles _Inputs _Jump _Rank
"""


def test_every_folder_is_a_mode_and_every_mode_a_folder() -> None:
    folders = {p.name for p in FOLDERS.iterdir() if p.is_dir() and p.name != "__pycache__"}
    assert folders == {folder_of(slug) for slug in SLUGS}
    assert [m.number for m in MODES] == list(range(1, len(SLUGS) + 1))
    assert all((FOLDERS / name / "runbook.md").is_file() for name in folders)


def test_a_folder_under_another_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_mode").mkdir()
    source = "from fp8watch_server.detect.modes.bad_batch import MODE\n"
    (tmp_path / "some_mode" / "__init__.py").write_text(source)
    monkeypatch.setattr(registry, "__path__", [str(tmp_path)])
    with pytest.raises(ImportError, match="the folder of that one is bad_batch"):
        registry._registered()


def test_modes_are_asked_in_the_order_in_which_they_always_were() -> None:
    assert [kind.__name__ for kind in DETECTORS if kind.__name__ in ASKED] == ASKED
    assert [check.__name__ for check in STEP_CHECKS][:1] == ["wrong_outputs"]  # of two modes, asked once
    assert len(set(STEP_CHECKS)) == len(STEP_CHECKS)


def test_thresholds_keep_their_names_and_their_order() -> None:
    """Rules files are written with the names; what `fp8watch rules list` prints is read by people who know its order."""
    names = [t.name for t in TABLE]
    assert names[: len(THRESHOLDS.split())] == THRESHOLDS.split()
    assert re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.M) == names, (
        "python -m benchmarks.detection.page writes it"
    )


def test_a_detector_is_named_by_every_mode_that_it_finds() -> None:
    for kind in DETECTORS:
        assert {m.slug for m in MODES if kind in m.detectors} == set(kind.modes), kind


def test_a_detector_of_one_mode_lies_in_its_folder() -> None:
    for kind in DETECTORS:
        *_, room, _ = kind.__module__.split(".")
        assert room == (folder_of(kind.modes[0]) if len(kind.modes) == 1 else "families"), kind


def test_a_family_that_is_named_is_there() -> None:
    rooms = [p for p in FOLDERS.parent.rglob("*.py") if "families." in p.read_text()]
    named = {(p, name) for p in rooms for name in re.findall(r"`families\.(\w+)`", p.read_text())}
    assert len(named) >= 15
    assert [(p, name) for p, name in named if not (FOLDERS.parent / "families" / f"{name}.py").is_file()] == []


def test_precedence_names_no_mode_that_is_not_there() -> None:
    named = {*precedence.ASKED, *precedence.GLOBAL_ROOTS, *precedence.EXACT_MODES, *precedence.SETTLING}
    named |= {*precedence.SAME_PARENT, *precedence.PRECURSORS, *precedence.PRECURSORS.values(), *precedence.EXPLAINS}
    named |= {*precedence.FADING, *precedence.EXPLAINS_THERE}
    named = named.union(*precedence.EXPLAINS.values(), *precedence.EXPLAINS_THERE.values())
    kinds = {
        precedence.LEAP,
        precedence.FALL,
        precedence.IN_EFFECT,
        precedence.LOADED,
        precedence.ON_THE_WAY,
        precedence.WEIGHT_LEAP,
        precedence.WEIGHT_FIRST,
    }
    assert named - kinds <= set(SLUGS)
    assert {slug for kind in DETECTORS for slug in kind.modes} == set(precedence.ASKED)


def test_names_under_which_a_state_is_saved_never_change() -> None:
    assert set(SAVED.split()) <= set(_CLASSES)
    assert names_in(FILE.read_bytes()) == set(SAVED.split()) - {"Notice"}


def test_a_state_that_an_earlier_version_saved_is_gone_on_from() -> None:
    trace = run()
    new = engine_of(trace)
    old = DetectionEngine.load(FILE.read_bytes(), new.sites)
    found = []
    for batch in list(trace.batches(PER_BATCH))[SAVED_AFTER:]:
        got = old.observe(batch)
        assert repr(got) == repr(new.observe(batch))
        found += got
    assert {f.mode for f in found} >= {"recipe-mismatch", "bad-batch", "delayed-clip", "attention-logit-growth"}


def test_a_detector_that_a_state_does_not_hold_begins_anew() -> None:
    trace = run()
    engine = engine_of(trace)
    kept = engine._statistics._detectors
    engine._statistics._detectors = [d for d in kept if type(d).__name__ != "Noise"]
    again = DetectionEngine.load(engine.dump(), engine.sites)
    assert [type(d) for d in again._statistics._detectors] == list(DETECTORS)
    for batch in list(trace.batches(PER_BATCH))[SAVED_AFTER:]:
        again.observe(batch)


def test_what_else_it_could_be_is_a_mode() -> None:
    for mode in MODES:
        assert mode.slug not in dict(mode.alternatives)
        assert set(dict(mode.alternatives)) <= set(MODE_BY_SLUG)
