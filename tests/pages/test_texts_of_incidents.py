"""What the collector and people say of an incident stands on its page and in its report as it was said."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from fastapi import FastAPI
from pages import synthetic
from pages.collector import make_app, serving
from pages.synthetic import INCIDENT_ID

MODULE = "[Sign in again](https://evil.example/)"
PATTERNS = "layers.*.experts.*.up, layers.*.mlp.down"


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> FastAPI:
    """An incident of a module whose name wants to be a link."""
    return make_app(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module")
def client(app: FastAPI) -> Iterator[httpx.Client]:
    with serving(app) as client:
        run = synthetic.Run(client, "r", "r", sites=synthetic.make_sites(1)).register()
        run.send(range(3), fault=False)
        synthetic.add_incident(
            app.state.engine, "r", INCIDENT_ID, first_step=1, last_step=2, sites=[], title=f"NaN in {MODULE}",
            cause=f"{MODULE} and what is behind it: GEMMs that are not observed are {PATTERNS}. It stores `448`.",
            fix=[{"kind": "code", "text": f"Clip the output of {MODULE} before {PATTERNS}."}],
            alternatives=[{"mode": "nan-in-loss", "check": f"Is {MODULE} finite, and {PATTERNS}?"}],
        )  # fmt: skip
        yield client


def both(client: httpx.Client) -> Iterator[str]:
    for path in (f"/incidents/{INCIDENT_ID}", f"/incidents/{INCIDENT_ID}/report.html"):
        answer = client.get(path)
        assert answer.status_code == 200
        yield answer.text


def test_names_in_sentences_are_no_markup(client: httpx.Client) -> None:
    for html in both(client):
        assert 'href="https://evil' not in html
        assert html.count(PATTERNS) >= 3
        assert "<code>448</code>" in html


def test_a_comment_is_read_whole(client: httpx.Client) -> None:
    text = (
        "\n".join(f"line {i}: the learning rate was lowered, and the norm was watched" for i in range(60)) + " LASTWORD"
    )
    assert client.post(f"/api/v1/incidents/{INCIDENT_ID}/comment", json={"text": text}).status_code == 200
    for html in both(client):
        timeline = html[html.index('class="timeline"') :]
        assert "LASTWORD" in timeline
        assert "characters)" not in timeline


def test_a_note_on_a_run_is_read_whole(client: httpx.Client) -> None:
    note = "why this run was started again, " * 20 + "LASTWORD"
    assert client.patch("/api/v1/runs/r", json={"note": note}).status_code == 200
    html = client.get("/runs/r").text
    assert "LASTWORD" in html[html.index('class="note-text"') :].split("</p>")[0]
