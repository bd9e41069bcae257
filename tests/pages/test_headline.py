"""The first five seconds: what a run needs stands first, and calm says what it stands for."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
from pages import synthetic
from pages.collector import make_app, serving
from pages.synthetic import INCIDENT_ID

from fp8watch_server.pages.coverage import agents
from fp8watch_server.pages.headline import Watched, headline, in_order, need_of
from fp8watch_server.pages.page_queries import _by_state
from fp8watch_server.store import run_list
from fp8watch_server.store.rank_sessions import OfRanks

RUN = {"id": "r", "status": "running", "last_step": 299, "last_seen_at": time.time(), "world_size": 1, "num_sites": 89}
EACH = Watched(0, 299, 89, 1.0)


def incident(**values: Any) -> dict[str, Any]:
    """As page_queries.incidents gives them."""
    base = {"state": "open", "severity": "critical", "first_step": 90, "last_step": 94, "title": "It broke"}
    return {**base, "attempt": 1, "regression_of": None, "owner": "", "status": "open", **values}


ON_TIME = {"num_late_steps": 0, "last_late_step": None}


def says(
    *incidents: dict[str, Any], run: dict[str, Any] | None = None, seen: Watched = EACH, not_watching: str | None = None,
    sessions: list[dict[str, Any]] | None = None, observed: float | None = None,
) -> tuple[str, str]:  # fmt: skip
    """Tone and sentence."""
    session = {
        "rank": 0,
        "attempt": 1,
        "host": "h",
        "ended": False,
        "versions": {},
        "last_seen_at": time.time(),
        **ON_TIME,
    }
    of_run = {**RUN, **(run or {}), "sessions": [{**session, "health": {}}] if sessions is None else sessions}
    got = headline(
        of_run,
        incidents,
        not_watching,
        agents(of_run, OfRanks(of_run["sessions"], len(of_run["sessions"]))),
        seen,
        observed=observed,
    )
    return got.tone, got.sentence


def test_what_was_critical_and_nobody_saw_comes_before_a_warning_that_is_open() -> None:
    warning = incident(severity="warning", title="open", first_step=1)
    over = incident(state="unseen", status="resolved", title="over", first_step=2)
    of_run = [
        incident(state="seen", first_step=0),
        warning,
        incident(state="acknowledged"),
        over,
        incident(first_step=9),
    ]
    found = sorted(of_run, key=_by_state)
    assert [i["state"] for i in found] == ["open", "unseen", "open", "acknowledged", "seen"]
    assert says(over, warning) == ("critical", "Over, and not seen yet (steps 2–94): over.")


def test_a_run_that_broke_before_what_is_said_says_when_it_broke_first() -> None:
    def more(*incidents: dict[str, Any]) -> str:
        return headline({**RUN, "sessions": []}, incidents, None, {}, EACH).more  # type: ignore[arg-type]

    back = incident(regression_of="x", first_step=200)
    over = [incident(state="unseen", status="resolved", first_step=step) for step in (150, 175)]
    so_far = ", nothing raised in the {} steps before step {}".format
    assert more(back, *over) == "2 more not seen yet, the first at step 150" + so_far(150, 150)
    assert more(incident(), incident(first_step=91)) == "1 more open" + so_far(90, 90)
    other = more(back, {**over[0], "attempt": 2})  # steps of another attempt
    assert other == "1 more not seen yet" + so_far(150, 150)
    assert more(back) == so_far(200, 200).removeprefix(", ")
    assert more(incident(first_step=0)) == ""


def test_a_cause_that_came_several_times_is_told_from_the_first_on_and_where_it_was_closed() -> None:
    steps = (150, 175, 200)
    of = [incident(first_step=s, last_step=s, cause_id="c", regression_of="x", title=f"at {s}") for s in steps]
    over = [{**i, "state": "unseen", "status": "resolved"} for i in of[:2]]
    got = headline({**RUN, "sessions": []}, [of[2], *over], None, {}, EACH, fixed_in="lm-1118")  # type: ignore[arg-type]
    assert got.sentence == "Broken since step 150, again at 175 and 200, though closed as fixed in lm-1118: at 150."
    assert got.incident is over[0]
    assert got.more == "nothing raised in the 150 steps before step 150"
    got = headline({**RUN, "sessions": []}, over, None, {}, EACH)  # type: ignore[arg-type]
    assert got.sentence == "Over, and not seen yet (steps 150–175, again at 175): at 150."
    late = incident(first_step=210, severity="warning")
    early = incident(first_step=140, severity="warning")
    assert [i["first_step"] for i in in_order([of[2], *over[::-1], late, early])] == [140, 150, 175, 200, 210]
    assert in_order([]) == []


def test_every_state_of_a_run_has_its_sentence_and_every_orange_its_reason() -> None:
    lost = {
        "rank": 3,
        "attempt": 1,
        "host": "h",
        "ended": False,
        "versions": {},
        "last_seen_at": time.time(),
        **ON_TIME,
    }
    cases: list[tuple[tuple[str, str], tuple[str, str]]] = [
        (says(), ("calm", "Nothing raised in 300 steps, 89 sites, each step.")),
        (
            says(seen=Watched(0, 299, 89, 1 / 8)),
            ("calm", "Nothing raised in 300 steps, 89 sites, each in 1 of 8 steps."),
        ),
        (says(incident()), ("critical", "Broken since step 90: It broke.")),
        (
            says(incident(regression_of="x")),
            ("critical", "Broken since step 90, though closed as fixed before: It broke."),
        ),
        (says(incident(severity="warning")), ("warning", "Needs a look since step 90: It broke.")),
        (
            says(incident(state="unseen", status="resolved")),
            ("critical", "Over, and not seen yet (steps 90–94): It broke."),
        ),
        (says(incident(state="acknowledged", owner="ann")), ("info", "Acknowledged by ann: It broke.")),
        (
            says(incident(state="seen", status="resolved")),
            ("calm", "Nothing raised since step 94: 205 steps, 89 sites, each step."),
        ),
        (says(not_watching="Attached, but no step has ended."), ("warning", "Not watching: no step has ended.")),
        (
            says(run={"num_sites": 0}, seen=Watched(0, 299, 0, None)),
            ("warning", "Not watching any GEMM: attach took no Linear over; only loss and steps are recorded."),
        ),
        (
            says(run={"status": "stalled", "last_seen_at": time.time() - 301}),
            ("warning", "Silent for 5 min: the last step that came is 299, and the process did not say that it ended."),
        ),
        (
            says(seen=Watched(0, 299, 89, None)),
            ("warning", "No statistics in the last steps: paused, outside of attach(windows=), or dropped on the way."),
        ),
        (
            says(sessions=[{**lost, "health": {"dropped_ring_full": 12.0}}]),
            ("warning", "Nothing raised, but not everything arrived: rank 3: 12 records lost (ring_full)."),
        ),
        (
            says(sessions=[{**lost, "health": {}, "num_late_steps": 480, "last_late_step": 539}]),
            (
                "warning",
                "Nothing raised, but not everything came in time: rank 3: 480 steps, the last of them 539, came too late "
                "to be compared with other ranks.",
            ),
        ),
        (
            says(run={"world_size": 8}),
            ("warning", "Nothing raised, but not everything arrived: 7 of 8 ranks never came."),
        ),
        (
            says(observed=0.22),
            ("warning", "Nothing raised in what is observed: that is 22 % of the model's GEMM FLOPs."),
        ),
    ]
    assert [got for got, _ in cases] == [want for _, want in cases]


def test_a_failure_that_is_over_asks_until_somebody_has_seen_it(tmp_path_factory: pytest.TempPathFactory) -> None:
    def tone_and_text(html: str) -> tuple[str, str]:
        found = re.search(r'<div class="headline (\w+)".*?</div>', html, re.S)
        assert found is not None
        return found[1], re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", found[0]))

    app = make_app(tmp_path_factory.mktemp("unseen"))
    with serving(app) as client:
        run = synthetic.Run(client, "r", "a run", sites=synthetic.make_sites(3)).register()
        run.send(range(100), fault=False, ended=True)
        over = {"status": "resolved", "resolved_at": time.time(), "cause_id": "c" * 16, "owner": "ann"}
        synthetic.add_incident(app.state.engine, "r", INCIDENT_ID, **over)
        tone, words = tone_and_text(client.get("/runs/r").text)
        listed = client.get("/").text
        assert tone == "critical"
        assert "Over, and not seen yet (step 90): One Inf in the input" in words
        assert words.index("One Inf") < words.index("FP8 is the cause")  # the sentence first, the verdict second
        assert '<tr class="asks critical">' in listed
        page = client.get("/runs/r").text
        assert "<title>a run (r) · fp8watch</title>" in page
        assert page.count('<small class="mono muted runid">r</small>') == 2  # beside its name, and above
        assert '<small class="mono muted runid">r</small>' in client.get(f"/incidents/{INCIDENT_ID}").text
        assert 'href="/?owner=ann"' in page.partition('id="owners"')[2].partition("</span>")[0]
        assert "broke, not seen yet" in listed
        assert 'data-act="seen"' in client.get(f"/incidents/{INCIDENT_ID}").text

        answer = client.post(f"/api/v1/incidents/{INCIDENT_ID}/seen", auth=("ann", "x"))
        assert answer.json()["state"] == "seen"
        assert answer.json()["events"][-1]["detail"] == {"by": "ann"}
        assert tone_and_text(client.get("/runs/r").text)[0] == "calm"
        assert "asks critical" not in client.get("/").text


def test_what_has_ended_is_not_broken_now() -> None:
    run: Any = {"need": run_list.CRITICAL_OPEN, "status": "running", "not_watching": "", "last_seen_at": 0.0}
    assert need_of(run) == ("critical", "broken now", "")
    assert need_of({**run, "status": "ended"}) == ("critical", "ended broken", "")
