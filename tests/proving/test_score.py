"""What is counted: found, named, placed, late, false; and how wide the intervals are."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from proving import page
from proving.judge import judge, loss_shows, same_until_onset
from proving.run import read
from proving.score import cause, compact, interval, misses, precision, recall, score, upper_bound
from proving.split import (
    DEV_FAMILIES,
    DEV_GENERATORS,
    FRESH_GENERATORS,
    HELD_OUT_FAMILIES,
    HELD_OUT_GENERATORS,
    UNSEEN_GENERATORS,
    split_of,
)

STEP = 40
LOSS = [2.0 + 0.01 * (-1) ** i for i in range(80)]


def incident(mode: str, step: int, **changed: Any) -> dict[str, Any]:
    """As the API says it."""
    place = {"module": "layers.1.w2", "operand": "input", "ranks": [0]} | changed.pop("place", {})
    usual = {"severity": "warning", "verdict": "fp8", "opened_step": step + 2, "opened_at": 1.0 * step, "title": ""}
    return usual | {"mode": mode, "first_step": step, "place": place} | changed


def fault(*incidents: dict[str, Any], change: str = "clip", family: str = "llama", **changed: Any) -> dict[str, Any]:
    """A line of results."""
    expected = {"modes": ["delayed-clip", "outlier-growth"], "modules": ["layers.1"], "operand": "input", "fp8": True}
    line = {
        "id": f"{family}-{change}-medium-1", "family": family, "change": change, "kind": "fault", "severity": "medium",
        "seed": 1, "split": "dev", "step": STEP, "until": None, "expected": expected, "steps": 80, "loss": LOSS,
        "incidents": list(incidents),
    }  # fmt: skip
    return line | changed


def twin(*incidents: dict[str, Any], family: str = "llama") -> dict[str, Any]:
    """The healthy run beside it."""
    return {
        "id": f"{family}-healthy-1", "family": family, "change": "healthy", "kind": "twin", "severity": "", "seed": 1,
        "split": "dev", "steps": 80, "loss": LOSS, "incidents": list(incidents),
    }  # fmt: skip


def test_a_fault_is_found_by_what_comes_at_its_step_or_later_and_the_first_word_counts() -> None:
    got = judge(fault(incident("bad-batch", STEP + 3), incident("delayed-clip", STEP + 5)), twin())
    assert (got.found, got.said, got.cause) == (True, "bad-batch", False)
    got = judge(fault(incident("outlier-growth", STEP)), twin())
    assert (got.found, got.cause, got.place, got.fp8, got.delay) == (True, True, True, True, 2)
    assert not judge(fault(), twin()).found
    assert not judge(fault(incident("delayed-clip", STEP - 5)), twin()).found
    got = judge(fault(incident("delayed-clip", STEP - 20, opened_step=STEP + 8)), twin())
    assert (got.found, got.dated, got.delay) == (True, False, 8), "looked at in turns: the last good look was earlier"


def test_what_the_twin_says_too_is_nothing() -> None:
    said = incident("delayed-clip", STEP + 3)
    assert not judge(fault(said), twin(incident("delayed-clip", 10))).found
    assert judge(fault(said), twin(incident("delayed-clip", 10, place={"module": "layers.0.w1"}))).found


@pytest.mark.parametrize(
    ("place", "right"),
    [
        ({}, True),
        ({"module": "module.layers.1.w2"}, True),
        ({"module": "layers.1"}, True),
        ({"module": "layers.11.w2"}, False),
        ({"module": "layers"}, False),
        ({"module": None}, False),
        ({"operand": "weight"}, False),
        ({"operand": None}, True),
    ],
)
def test_a_place_is_right_inside_of_the_expected_module(place: dict[str, Any], right: bool) -> None:
    assert judge(fault(incident("delayed-clip", STEP, place=place)), twin()).place is right


def test_a_place_is_right_without_what_peft_puts_around_a_module() -> None:
    line = fault(incident("delayed-clip", STEP, place={"module": "model.layers.1.w2"}))
    line["expected"]["modules"] = ["base_model.model.model.layers.1.w2.base_layer"]
    assert judge(line, twin()).place is True
    line["expected"]["modules"] = ["base_model.model.model.layers.1.w2.lora_A"]
    assert judge(line, twin()).place is False


def test_a_verdict_of_unknown_is_not_right() -> None:
    assert judge(fault(incident("delayed-clip", STEP, verdict="unknown")), twin()).fp8 is False


def test_the_loss_shows_a_fault_where_it_is_six_sigma_off_its_twin() -> None:
    small = [v + (0.03 if i >= STEP else 0) for i, v in enumerate(LOSS)]
    large = [v + (0.2 if i >= STEP + 7 else 0) for i, v in enumerate(LOSS)]
    lost = [None if i >= STEP + 2 else v for i, v in enumerate(LOSS)]
    assert loss_shows(small, LOSS, STEP) is None
    assert loss_shows(large, LOSS, STEP) == STEP + 7
    assert loss_shows(lost, LOSS, STEP) == STEP + 2
    assert judge(fault(incident("delayed-clip", STEP), loss=large), twin()).lead == 5


def test_runs_that_differ_before_the_fault_are_no_twins() -> None:
    assert same_until_onset(fault(), twin())
    other = fault(loss=[1.0, *LOSS[1:]])
    assert not same_until_onset(other, twin())
    kept = compact({line["id"]: line for line in (other, twin())})
    assert score(kept, "dev").faulty == []
    assert f"not scored: {other['id']}" in page.part(kept)


def test_warnings_of_healthy_runs_are_false_and_those_of_the_twin_count_once() -> None:
    trap = twin(incident("bad-batch", 50), incident("dead-layer", 60, severity="info")) | {"kind": "trap", "id": "t"}
    both = twin(incident("bad-batch", 50))
    got = score([trap, both, fault()], "dev")
    assert [i["mode"] for _, i in got.false("warning", "critical")] == ["bad-batch"]
    assert [i["mode"] for _, i in got.false("info")] == ["dead-layer"]
    assert got.num_healthy_steps == 160


def test_a_second_wrong_name_costs_precision_and_not_recall() -> None:
    lines = [fault(incident("delayed-clip", STEP), incident("bad-batch", STEP + 30)), twin()]
    got = score(lines, "dev")
    assert (recall(got.faulty), cause(got.faulty), precision(got.faulty)) == (1.0, 1.0, 0.5)


def test_broken_runs_are_not_scored() -> None:
    assert score([fault(broken="x"), twin()], "dev").faulty == []


def test_intervals_are_as_wide_as_the_clusters_are_few() -> None:
    """Forty runs of two clusters are two observations, not forty."""
    few = [fault(*[incident("delayed-clip", STEP)] * (n % 2), change=f"f{n % 2}", id=str(n)) for n in range(40)]
    many = [fault(*[incident("delayed-clip", STEP)] * (n % 2), change=f"f{n}", id=str(n)) for n in range(40)]
    wide, narrow = (interval([judge(x, twin()) for x in lines], recall) for lines in (few, many))
    assert wide == (0.0, 1.0)
    assert narrow[0] > 0.3
    assert narrow[1] < 0.7


def test_the_bound_of_a_rate_is_poissons() -> None:
    assert upper_bound(0) == pytest.approx(-math.log(0.05), rel=1e-6)
    assert upper_bound(3) == pytest.approx(7.754, abs=1e-3)


def test_every_family_and_generator_is_in_one_half() -> None:
    assert not set(DEV_FAMILIES) & set(HELD_OUT_FAMILIES)
    assert not set(DEV_GENERATORS) & set(HELD_OUT_GENERATORS)
    assert not set(FRESH_GENERATORS) & set(DEV_GENERATORS + HELD_OUT_GENERATORS)
    assert not set(UNSEEN_GENERATORS) & set(DEV_GENERATORS + HELD_OUT_GENERATORS + FRESH_GENERATORS)
    assert split_of("llama", "codes") == "dev"
    assert split_of("vit", "scales") == "held-out"
    assert split_of("vit", "codes") == split_of("llama", "scales") == "crossed"
    with pytest.raises(ValueError, match="in no split"):
        split_of("llama", "of-tomorrow")


def test_the_tree_keeps_what_scoring_needs(tmp_path: Path) -> None:
    """The compact lines give the same score as the whole ones."""
    off = [v + (0.2 if i >= STEP + 7 else 0) for i, v in enumerate(LOSS)]
    lines = [fault(incident("delayed-clip", STEP, place={"module": "module.layers.1.w2"}), loss=off), twin()]
    kept = compact({line["id"]: line for line in lines})
    (whole,), (short,) = score(lines, "dev").faulty, score(kept, "dev").faulty
    assert (short.lead, short.delay, short.cause, short.place) == (whole.lead, whole.delay, whole.cause, whole.place)
    assert "loss" not in json.dumps(kept).replace("loss_step", "")


def test_results_survive_a_kill_in_the_middle_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(json.dumps(twin()) + "\n" + json.dumps(fault())[:50])
    assert list(read(path)) == ["llama-healthy-1"]


def test_a_miss_is_listed_with_what_was_said_and_a_hit_is_not() -> None:
    listed = "\n".join(misses([fault(), fault(incident("delayed-clip", STEP), change="fine", id="x"), twin()], "dev"))
    assert "llama clip seed 1" in listed
    assert "fine" not in listed


def test_the_page_is_replaced_between_its_markers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "detection.md"
    path.write_text("# Detection\n\nbefore\n")
    monkeypatch.setattr(page, "PAGE", path)
    page.put("first")
    path.write_text(path.read_text() + "after\n")
    page.put("second")
    assert path.read_text() == f"# Detection\n\nbefore\n\n{page.BEGIN}\nsecond\n{page.END}\nafter\n"


def test_the_page_says_how_many_faults_a_figure_rests_on() -> None:
    lines = [fault(incident("delayed-clip", STEP), split="held-out"), twin() | {"split": "held-out"}]
    text = page.part(lines)
    assert "| delayed-clip | 1 | 1 | 1.00 | 1.00 | 1.00 | 2 (of 1) |" in text
    assert (
        "| false pages per 1000 healthy steps | ≤ 0.1 | – | – | – | – | – | 0.00 (0 in 80; at most 37.45) | – | – |"
        in text
    )


def test_the_fresh_set_has_its_column_and_its_sections_once_it_has_been_run() -> None:
    line = fault(incident("delayed-clip", STEP), family="bert", split="fresh")
    runs = [line, twin(family="bert") | {"split": "fresh"}]
    text = page.part(runs)
    assert "| | goal | concealed | veiled | sealed | unseen | fresh | held out | crossed | dev |" in text
    assert "| recall, medium and severe | ≥ 0.90 | – | – | – | – | 1.00 (1.00–1.00) | – | – | – |" in text
    assert "### By mode, fresh" in text
    without = page.part([fault(), twin()])
    assert "### By mode, fresh" not in without
    assert "| faulty runs / distinct faults |  | – | – | – | – | – | – | – | 1 / 1 |" in without
    assert "| median lead over the loss, in steps |  | – |" in without


def test_the_unseen_set_comes_before_the_fresh_one_once_it_has_been_run() -> None:
    line = fault(incident("delayed-clip", STEP), family="world", split="unseen")
    text = page.part([line, twin(family="world") | {"split": "unseen"}])
    assert "| recall, medium and severe | ≥ 0.90 | – | – | – | 1.00 (1.00–1.00) | – | – | – | – |" in text
    assert "### By mode, unseen" in text
    assert "### By mode, fresh" not in text


def test_the_sealed_set_comes_before_the_unseen_one_once_it_has_been_run() -> None:
    line = fault(incident("delayed-clip", STEP), family="ranker", split="sealed")
    text = page.part([line, twin(family="ranker") | {"split": "sealed"}])
    assert "| recall, medium and severe | ≥ 0.90 | – | – | 1.00 (1.00–1.00) | – | – | – | – | – |" in text
    assert "### By mode, sealed" in text
    assert "### By mode, unseen" not in text


def test_the_veiled_set_comes_before_the_sealed_one_once_it_has_been_run() -> None:
    line = fault(incident("delayed-clip", STEP), family="graph", split="veiled")
    text = page.part([line, twin(family="graph") | {"split": "veiled"}])
    assert "| recall, medium and severe | ≥ 0.90 | – | 1.00 (1.00–1.00) | – | – | – | – | – | – |" in text
    assert "### By mode, veiled" in text
    assert "### By mode, sealed" not in text


def test_the_concealed_set_comes_before_all_others_once_it_has_been_run() -> None:
    line = fault(incident("delayed-clip", STEP), family="flow", split="concealed")
    text = page.part([line, twin(family="flow") | {"split": "concealed"}])
    assert "| recall, medium and severe | ≥ 0.90 | 1.00 (1.00–1.00) | – | – | – | – | – | – | – |" in text
    assert "### By mode, concealed" in text
    assert "### By mode, veiled" not in text


def test_what_the_twin_of_a_fresh_event_says_in_another_half_is_not_counted_again() -> None:
    """A fresh healthy event may be in a held-out family, whose twin is scored there."""
    said = incident("bad-batch", 50)
    trap = twin(said, family="ssm") | {"id": "ssm-packing-begins-1", "change": "packing-begins", "kind": "trap"}
    lines = [trap | {"split": "fresh"}, twin(said, family="ssm") | {"split": "held-out"}]
    assert score(lines, "fresh").false("warning") == []
    assert len(score(lines, "held-out").false("warning")) == 1
    assert len(score(lines[:1], "fresh").false("warning")) == 1
