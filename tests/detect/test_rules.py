"""Rules files change thresholds for some runs; what cannot be meant is refused with value, rule and remedy."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from detect.play import play
from detect.scenarios import BY_NAME

import fp8watch_server
from fp8watch_server.detect.command import main
from fp8watch_server.detect.rules import RulesError, check, load_rules
from fp8watch_server.detect.thresholds import DEFAULTS, TABLE, Thresholds

SERVER = Path(fp8watch_server.__file__).parent
GOOD = """
[defaults]
clip_depth = 2.0
[runs."llama-*"]
underflow_alarm_points = "9 %"
sqnr_drop_db = "4 dB"
warmup_steps = "100 steps"
disable = ["bad-batch"]
"""


def test_every_section_that_matches_counts(tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    path.write_text(GOOD)
    rules = load_rules(path)
    mine = rules.thresholds_for("4711", "llama-7b")
    assert (mine.clip_depth, mine.underflow_alarm_points, mine.sqnr_drop_db) == (2.0, 0.09, 4.0)
    assert mine.disabled == {"bad-batch"}
    other = rules.thresholds_for("4711", "gpt")
    assert other.changed() == {"clip_depth": 2.0}
    assert DEFAULTS.changed() == {}


def test_every_threshold_is_read_somewhere() -> None:
    code = "\n".join(path.read_text() for path in SERVER.rglob("*.py"))
    assert [t.name for t in TABLE if not re.search(rf"\.{t.name}\b", code)] == []


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"defaults": {"clip_dept": 2}}, "did you mean clip_depth?"),
        ({"defaults": {"clip_depth": 0.5}}, "from 1.01 to 1e+06; the default is 1.5"),
        ({"defaults": {"clip_depth": "2 dB"}}, "the unit is ratio, not dB"),
        ({"defaults": {"sqnr_drop_db": "3 octaves"}}, "the unit is dB, not octaves"),
        ({"defaults": {"warmup_steps": 10.5}}, "whole number of steps"),
        ({"defaults": {"warmup_steps": True}}, "must be a number of steps"),
        ({"defaults": {"clip_depth": float("nan")}}, "must be a number"),
        ({"defaults": {"clip_depth": "much"}}, "must be a number"),
        ({"defaults": {"clip_depth": 10**400}}, "must be a number of ratio from 1.01"),
        ({"defaults": {"warmup_steps": -(10**400)}}, "must be a number of steps from 0"),
        ({"defaults": {"clip_depth": "\ud800"}}, "must be a number"),
        ({"defaults": {"disable": ["bad-bach"]}}, "did you mean bad-batch?"),
        ({"default": {}}, "did you mean defaults?"),
        ({"runs": {"x": 3}}, "must be a table"),
        ({"runs": [1]}, "must be tables"),
        ([], "must be tables"),
        ({"defaults": {"attention_logit_warning": 2e4, "attention_logit_critical": 1e4}}, "the page would come first"),
        ({"defaults": {"frozen_clip_depth": 3.0}}, "above clip_depth"),
    ],
)
def test_what_cannot_be_meant_is_refused(data: Any, says: str) -> None:
    with pytest.raises(RulesError) as error:
        check(data)
    assert says in str(error.value)


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(RulesError) as error:
        check({"defaults": {"clip_dept": 2, "warmup_steps": -1}, "x": 1})
    assert len(error.value.problems) == 3


def test_the_command_checks_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad, broken, as_json = (tmp_path / n for n in ("good.toml", "bad.toml", "broken.toml", "rules.json"))
    good.write_text(GOOD)
    bad.write_text("[defaults]\nclip_depth = 'many'\n")
    broken.write_text("[defaults\n")
    as_json.write_text(json.dumps({"defaults": {"clip_depth": 3}}))
    assert main(["check", str(good), "--run", "llama-x"]) == 0
    assert "underflow_alarm_points = 0.09" in capsys.readouterr().out
    assert main(["check", str(as_json)]) == 0
    capsys.readouterr()
    for path, says in ((bad, "must be a number of ratio"), (broken, "not TOML"), (tmp_path / "none", "cannot be read")):
        assert main(["check", str(path)]) == 1
        assert says in capsys.readouterr().err
    assert main(["list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(TABLE)


def test_a_default_lies_in_its_own_range() -> None:
    assert [t.name for t in TABLE if not t.low <= t.default <= t.high] == []
    check({"defaults": {t.name: t.default for t in TABLE}})


def test_a_threshold_and_a_switched_off_mode_change_what_is_said() -> None:
    case = BY_NAME["chronic-quantization-noise"].make(1, 0)
    assert {f.mode for f in play(case)} == {"chronic-quantization-noise"}
    assert play(case, Thresholds({"chronic_sqnr_e4m3_db": 20.0})) == []
    assert play(case, Thresholds(disabled=frozenset({"chronic-quantization-noise"}))) == []


def test_thresholds_are_frozen_and_known() -> None:
    with pytest.raises(AttributeError):
        DEFAULTS.clip_depth = 3  # type: ignore[misc]
    with pytest.raises(KeyError):
        Thresholds({"x": 1})
