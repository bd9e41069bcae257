"""After a restart from a checkpoint the steps of an incident are those of a newer attempt: that is said wherever they are shown."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from pages import synthetic
from pages.collector import make_app, serving
from pages.synthetic import FAULT_MODULE, FAULT_STEP, FAULT_TILE

from fp8watch_server.pages.thumbnail import BROKEN

OVER, ON = ("a" * 31 + n for n in "12")
AGAIN = (
    "Steps from {} on were computed again in attempt 2: charts and the flight recorder show these, not the steps of "
    "attempt 1, in which this was found."
)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A run with an Inf at FAULT_STEP, and a second attempt that passes it cleanly."""
    app = make_app(tmp_path_factory.mktemp("again"))
    with serving(app) as client:
        sites = [s for s in synthetic.make_sites() if s.module == FAULT_MODULE]
        run = synthetic.Run(client, "again", "again", sites=sites, session="a" * 32).register()
        run.send(range(FAULT_STEP - 30, FAULT_STEP + 5))
        run.send_maps([FAULT_STEP], sites)
        synthetic.add_incident(app.state.engine, "again", OVER)
        synthetic.add_incident(app.state.engine, "again", ON, attempt=2, title="of the second attempt")
        for n, at in enumerate((FAULT_STEP - 29, FAULT_STEP - 20)):
            early = {"first_step": at, "last_step": at, "title": f"before {n}"}
            synthetic.add_incident(app.state.engine, "again", "b" * 31 + str(n), **early)
        second = dataclasses.replace(run, session="b" * 32, seq=0, map_seq=0, start=time.time()).register()
        second.send(range(FAULT_STEP - 20, FAULT_STEP + 20), fault=False)
        second.send_maps([FAULT_STEP], sites, fault=False)
        yield client


def said(html: str) -> str | None:
    """The note above the flight recorder, None where it is hidden."""
    found = re.search(r'<p class="note warning" id="done-again" data-live( hidden)?>(.*?)</p>', html)
    assert found is not None
    return None if found[1] else found[2]


def test_pages_of_an_incident_say_that_its_steps_were_done_again(client: httpx.Client) -> None:
    for page in ("", "/flight"):
        assert said(client.get(f"/incidents/{OVER}{page}").text) == AGAIN.format(FAULT_STEP - 20)
        assert said(client.get(f"/incidents/{ON}{page}").text) is None
    assert "<dt>Attempt</dt><dd>1 of 2</dd>" in client.get(f"/incidents/{OVER}").text
    assert said(client.get(f"/incidents/{'b' * 31}0").text) is None  # the second attempt began behind it
    assert said(client.get(f"/incidents/{'b' * 31}1").text) == AGAIN.format(FAULT_STEP - 20)


def test_still_and_report_say_it_before_they_say_that_nothing_stands_out(client: httpx.Client) -> None:
    told = AGAIN.format(FAULT_STEP - 20)

    def words(of: Any) -> str:
        return re.search(r'aria-label="Flight recorder[^"]*"', of.text)[0]  # type: ignore[index]

    for path in ("flight.svg", "report.html"):
        label = words(client.get(f"/incidents/{OVER}/{path}"))
        assert told in label
        assert label.index(told) < label.index(f"At step {FAULT_STEP} none of")
        assert "computed again" not in words(client.get(f"/incidents/{ON}/{path}"))
    assert client.get(f"/incidents/{OVER}/report.html").text.count(f'<p class="note warning">{told}</p>') == 1


def test_its_tiles_are_those_of_its_own_attempt(client: httpx.Client) -> None:
    assert BROKEN in client.get(f"/incidents/{OVER}/tiles.svg").text
    assert BROKEN not in client.get(f"/incidents/{ON}/tiles.svg").text
    tile = "<tr><td>({}, {})</td>".format(*FAULT_TILE)
    assert tile in client.get(f"/incidents/{OVER}/report.html").text
    assert tile not in client.get(f"/incidents/{ON}/report.html").text


def test_the_panel_of_tiles_asks_for_the_map_of_its_own_attempt(client: httpx.Client) -> None:
    tile = "{},{}".format(*FAULT_TILE)
    site = next(s["id"] for s in client.get("/api/v1/runs/again/sites").json()["items"] if s["operand"] == "input")
    api, map_page = f"/api/v1/runs/again/sites/{site}/tile-map", f"/runs/again/sites/{site}/tile-map"
    for incident, attempt, broken in ((OVER, 1, True), (ON, 2, False)):
        html = client.get(f"/incidents/{incident}").text
        assert f'data-attempt="{attempt}"' in html
        href = f"{map_page}?step={FAULT_STEP}&amp;attempt={attempt}&amp;tile={tile}"
        assert f'href="{href}"' in html
        asked = {"step": FAULT_STEP, "attempt": attempt}
        assert any(client.get(api, params=asked).json()["num_nonfinite"]) == broken
        shown = client.get(map_page, params=asked).text
        assert f"of attempt {attempt}</span>" in shown
        assert (f'data-tile="{tile}">' in shown) == broken
        assert f"?step={FAULT_STEP}&amp;attempt=1&amp;tile={tile}" in shown  # the way to the incident of attempt 1
    assert not any(client.get(api, params={"step": FAULT_STEP}).json()["num_nonfinite"])  # of the newest
    assert "of attempt" not in client.get(map_page, params={"step": FAULT_STEP}).text
