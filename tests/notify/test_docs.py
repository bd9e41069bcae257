"""docs/alerts.md says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from fp8watch_server.incidents.messages import FLAPPING_MESSAGES
from fp8watch_server.notify import outbox, safe_http
from fp8watch_server.notify.channels.base import Pace
from fp8watch_server.notify.channels.slack import SLACK_PACE
from fp8watch_server.notify.command import _parser
from fp8watch_server.notify.group import SUMMARY_EVERY_S
from fp8watch_server.notify.routes_file import KINDS, load_routes
from fp8watch_server.notify.stale_run import STALLED
from fp8watch_server.store.queries import STALLED_AFTER_S

PAGE = (Path(__file__).parents[2] / "docs" / "alerts.md").read_text()


def between(mark: str) -> str:
    return PAGE.split(f"<!-- {mark} -->\n")[1].split(f"\n<!-- /{mark} -->")[0]


def test_the_example_is_a_routes_file_that_works(tmp_path: Path) -> None:
    text = between("example").removeprefix("```toml\n").removesuffix("\n```")
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "slack-oncall").write_text("https://hooks.example/x")
    path = tmp_path / "routes.toml"
    path.write_text(text)
    environ = dict.fromkeys(("PIPELINE_URL", "PIPELINE_SECRET", "ALERTMANAGER_URL"), "https://hooks.example/y")
    routing, warnings = load_routes(path, environ)
    assert warnings == []
    assert routing.channels_for("llama-7b", "", "critical", "dead-layer") == ["oncall", "alertmanager", "pipeline"]
    assert routing.channels_for("scratch-1", "", "critical", "dead-layer") == []


def test_kinds_fields_and_numbers_are_those_of_the_code() -> None:
    assert re.findall(r"^\| `(\w+)`", between("kinds"), re.M) == list(KINDS)
    pace = Pace()
    defaults = {"min_interval": f"{pace.min_interval_s:g} s", "group_wait": f"{pace.group_wait_s:g} s"}
    defaults |= {"group_interval": f"{pace.group_interval_s:g} s", "max_per_hour": str(pace.max_per_hour)}
    assert dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", between("pace"), re.M)) == defaults
    assert f"{SLACK_PACE.min_interval_s:g} s between messages, {SLACK_PACE.max_per_hour} an hour" in PAGE
    assert f"in a summary every {SUMMARY_EVERY_S:g} s" in PAGE
    assert f"ends after {safe_http.TOTAL_S:g} seconds" in PAGE.replace("\n", " ")
    assert f"at most {outbox.MAX_BACK_OFF_S:g} s in the first ten minutes" in PAGE
    assert outbox.LATE_S == 600
    assert FLAPPING_MESSAGES == 2
    assert f"`stalled` after {STALLED_AFTER_S:g} seconds" in PAGE
    assert f"`{STALLED}`" in PAGE
    assert sorted(
        map(int, re.findall(r"\d+", PAGE.split("message of several is refused (")[1].split(")")[0]))
    ) == sorted(outbox._TOGETHER_ONLY)


def test_the_commands_that_are_named_exist() -> None:
    known = set(re.findall(r"[a-z]+", _parser().format_usage().split("{")[1].split("}")[0]))
    assert set(re.findall(r"fp8watch notify (\w+)", PAGE)) == known
