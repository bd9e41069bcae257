"""What a form offers for editing, and what a script sends back, is the text as it is stored."""

from __future__ import annotations

import re
from pathlib import Path

from pages import synthetic
from pages.collector import make_app, serving
from pages.synthetic import INCIDENT_ID

MARKS = "a\u200fb\u202ec"
SHOWN = r"a\u200fb\u202ec"


def held(html: str, pattern: str) -> str:
    found = re.search(pattern, html, re.S)
    assert found is not None, pattern
    return found[1]


def test_marks_of_direction_are_offered_as_they_are_and_shown_as_escapes(tmp_path: Path) -> None:
    app = make_app(tmp_path)
    with serving(app) as client:
        run = synthetic.Run(client, "r", "r", sites=synthetic.make_sites(1)).register()
        run.send(range(3), fault=False)
        place = {"ranks": [0], "module": MARKS, "operand": "input", "direction": "rowwise", "gemm": "fprop"}
        synthetic.add_incident(app.state.engine, "r", INCIDENT_ID, sites=[], place=place, owner=MARKS)
        body = {"note": f"{MARKS}<b>", "tags": [MARKS]}
        assert client.patch("/api/v1/runs/r", json=body).status_code == 200
        html = client.get("/runs/r").text
        assert held(html, r'<textarea name="note"[^>]*>(.*?)</textarea>') == f"{MARKS}&lt;b&gt;"
        assert held(html, r'<input name="tags"[^>]* value="([^"]*)"') == MARKS
        assert held(html, r'class="note-text">(.*?)</p>') == f"{SHOWN}&lt;b&gt;"
        html = client.get(f"/incidents/{INCIDENT_ID}").text
        assert held(html, r'data-module="([^"]*)"') == MARKS
        assert held(html, r'<input name="owner"[^>]* value="([^"]*)"') == MARKS
        for path in ("/", "/incidents"):
            assert held(client.get(path, params={"q": MARKS}).text, r'name="q" value="([^"]*)"') == MARKS
