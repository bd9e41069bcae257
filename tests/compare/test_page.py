"""Two runs side by side as API, page and command say it; a report in one file; what a terminal shows."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from pages import synthetic
from pages.collector import make_app, serving
from pages.synthetic import FAULT_MODULE, FAULT_STEP, HOSTILE, HOSTILE_ID, INCIDENT_ID
from support.database import fresh_database

from fp8watch_agent.terminal import command, live, text
from fp8watch_server.pages import report_sections
from fp8watch_server.pages.redaction import Redaction

UNITLESS = {"field": "loss", "value": 2.5, "baseline": None, "unit": "", "since_step": 2}
SENTENCE = (
    f"They are identical to the last bit before step {FAULT_STEP}, and part there, first in {FAULT_MODULE} input. "
    f"At step {FAULT_STEP} one side is not finite, and the other is. The losses do not part."
)


@contextlib.contextmanager
def collector(folder: Path, url: str | None = None) -> Iterator[httpx.Client]:
    """A faulty run, its healthy twin, and a run whose names want to be markup."""
    app = make_app(folder, url)
    with serving(app) as client:
        synthetic.faulty_run(client, app.state.engine)
        twin = synthetic.Run(client, "twin/1", "a healthy twin", session="f" * 32).register()
        for first in range(0, 120, 20):
            twin.send(range(first, first + 20), fault=False)
        synthetic.hostile_run(client, app.state.engine)
        yield client
    app.state.engine.dispose()


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with collector(tmp_path_factory.mktemp("compare")) as client:
        yield client


def test_it_is_the_same_on_postgresql(client: httpx.Client, tmp_path: Path) -> None:
    with fresh_database("postgresql") as url, collector(tmp_path, url) as other:
        query = {"a": "demo-inf", "b": "twin/1"}
        found = [c.get("/api/v1/compare", params=query).json() for c in (client, other)]
        for of in found:
            for side in ("a", "b"):
                del of[side]["created_at"]
        assert found[0] == found[1]
        assert other.get(f"/incidents/{INCIDENT_ID}/report.html").status_code == 200


def test_api_page_and_command_say_the_same_sentence(client: httpx.Client, capsys: pytest.CaptureFixture[str]) -> None:
    found = client.get("/api/v1/compare", params={"a": "demo-inf", "b": "twin/1"}).json()
    assert found["sentence"] == SENTENCE
    place = found["map"]["sites"].index(
        {k: found["parting"]["sites"][0][k] for k in ("id", "module", "operand", "direction")}
    )
    assert [place, found["map"]["steps"].index(FAULT_STEP), "not finite in the first"] in found["map"]["marks"]
    assert set(found["loss"]["difference"]["values"]) == {0.0}

    page = client.get("/compare", params={"a": "demo-inf", "b": "twin/1"})
    assert page.status_code == 200
    assert SENTENCE in page.text
    assert "whether they saw the same data was not looked at" in page.text
    assert 'href="/compare?a=twin%2F1&amp;b=demo-inf"' in page.text

    collector = ["--collector", str(client.base_url)]
    assert command.compare_main(["demo-inf", "twin/1", *collector]) == 0
    assert capsys.readouterr().out.startswith(SENTENCE)


def test_a_page_without_two_runs_offers_them_and_one_that_is_unknown_is_named(client: httpx.Client) -> None:
    page = client.get("/compare", params={"a": "demo-inf"})
    assert page.status_code == 200
    assert re.search(r'<option value="demo-inf" selected', page.text)
    assert '<option value="twin/1">' in page.text
    assert client.get("/compare", params={"a": "demo-inf", "b": "nope"}).status_code == 404
    assert client.get("/compare", params={"a": "demo-inf", "b": "twin/1", "rank_a": "x"}).status_code == 400
    assert client.get("/api/v1/compare", params={"a": "demo-inf", "b": "nope"}).status_code == 404
    assert client.get("/api/v1/compare", params={"a": "demo-inf"}).status_code == 422


def test_names_that_want_to_be_markup_are_text(client: httpx.Client) -> None:
    run_id = HOSTILE.replace("/", "~")
    for url, query in (("/compare", {"a": run_id, "b": run_id}), (f"/incidents/{HOSTILE_ID}/report.html", {})):
        got = client.get(url, params=query).text
        assert "alert(" in got
        assert "<script>alert" not in got
        assert "<img src=x" not in got


def test_a_report_is_one_file_that_loads_nothing(client: httpx.Client) -> None:
    answer = client.get(f"/incidents/{INCIDENT_ID}/report.html")
    assert (
        answer.headers["content-disposition"]
        == f'attachment; filename="fp8watch-inf-laundering-step-{FAULT_STEP}.html"'
    )
    html = answer.text
    assert not re.search(r"""<script|<link|<img|<iframe|src=|url\((?!#)|@import|href="(?!#)""", html)
    for section in (
        "What to change",
        "Why, and the evidence",
        "Flight recorder",
        "Tiles",
        "Around the step",
        "Facts",
        "What was not looked at",
    ):
        assert f"<h2>{section}</h2>" in html
    assert "(131, 3)" in html
    assert html.count("<svg") >= 3
    assert "No comparison with BF16" in html or "no comparison with BF16 was made" in html
    assert "tiny-lm blockwise" in html


def test_a_redacted_report_holds_no_name(client: httpx.Client) -> None:
    html = client.get(f"/incidents/{INCIDENT_ID}/report.html", params={"redact": "1"}).text
    body = html.split("</style>")[1]
    for name in ("demo-inf", "tiny-lm", "node-1", "down_proj", "layers.2"):
        assert name not in body, name
    assert "names replaced" in body
    assert re.search(r"n\d\.2\.n\d\.n\d", body)
    assert f">{FAULT_STEP}" in body


def test_redaction_replaces_names_and_nothing_else() -> None:
    rename = Redaction(["layers.17.mlp.down_proj", "norm"], {"my run": "run", "node-1": "host0"})
    said = rename({"x": ["Inf in the input of `layers.17.mlp.down_proj`, see layers.3.mlp.up on node-1", 4.0, None]})
    assert said == {"x": ["Inf in the input of `n1.17.n2.n3`, see n1.3.n2.n0 on host0", 4.0, None]}
    assert rename("my runs are not my run; down_proj is") == "my runs are not run; n3 is"
    assert Redaction()("layers.17") == "layers.17"


def test_a_section_more_is_a_row_more(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def still(of: report_sections.Subject) -> report_sections.Section:
        return report_sections.Section("A still", "report/not_looked_at.html", {"lines": [f"of {of.run_id}"]})

    monkeypatch.setattr("fp8watch_server.pages.report.SECTIONS", (still,))
    html = client.get(f"/incidents/{INCIDENT_ID}/report.html").text
    assert "<h2>A still</h2>" in html
    assert "of demo-inf" in html


def test_runs_incidents_and_one_of_them_in_a_terminal(
    client: httpx.Client, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    collector = ["--collector", str(client.base_url)]

    def said(main: object, *args: str) -> str:
        assert main([*args, *collector]) == 0  # type: ignore[operator]
        return capsys.readouterr().out

    assert re.search(r"^demo-inf +tiny-lm blockwise +1 open +running +119 +105 ", said(command.runs_main), re.M)
    assert len(json.loads(said(command.runs_main, "--json", "-n", "2"))) == 2
    assert f"{FAULT_MODULE} input tile (131, 3) rank 0" in said(command.incidents_main, "--run", "demo-inf")
    assert json.loads(said(command.incidents_main, "--severity", "info", "--json")) == []
    assert "fix 2 (env): FP8_QUANT_FWD_INP_AMAX_EPS=1e-12" in said(command.show_main, INCIDENT_ID)
    assert "inf-laundering" in said(command.show_main, "demo-inf")
    assert json.loads(said(command.show_main, "demo-inf", "--json"))["incidents"][0]["id"] == INCIDENT_ID
    top = said(live.top_main, "--once")
    assert re.search(r"^tiny-lm blockwise +1 open +running +119 +[\d.]+ +[▁-█]+ ", top, re.M)
    assert json.loads(said(live.top_main, "--json"))["runs"][0]["loss"]["steps"]
    path = tmp_path / "report.html"
    assert "wrote" in said(command.report_main, INCIDENT_ID, "-o", str(path), "--redact")
    assert "names replaced" in path.read_text()

    assert command.show_main(["nope", *collector]) == 1
    assert "there is no run 'nope'" in capsys.readouterr().err
    assert command.runs_main(["--collector", "http://127.0.0.1:9"]) == 1
    assert "start `fp8watch serve`" in capsys.readouterr().err
    assert command.runs_main(["--collector", "ftp://x"]) == 2


def test_a_failure_that_was_over_before_anybody_saw_it_asks_in_a_terminal_and_on_a_card(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from fp8watch.session import card

    app = make_app(tmp_path)
    over = {"status": "resolved", "resolved_at": time.time(), "title": "Was laundered", "evidence": [UNITLESS]}
    with serving(app) as client:
        synthetic.Run(client, "over", "over").register().send(range(3), fault=False, ended=True)
        synthetic.add_incident(app.state.engine, "over", INCIDENT_ID, **over)
        collector = ["--collector", str(client.base_url)]

        def said(main: object, *args: str) -> str:
            assert main([*args, *collector]) == 0  # type: ignore[operator]
            return capsys.readouterr().out

        assert re.search(r"^over +over +1 not seen yet +ended ", said(command.runs_main), re.M)
        assert INCIDENT_ID in said(live.top_main, "--once")
        assert INCIDENT_ID in said(command.incidents_main, "--state", "asks")
        assert said(command.incidents_main, "--state", "open") == "no incidents\n"
        assert "  loss = 2.5\n" in said(command.show_main, INCIDENT_ID)
        assert "1: Was laundered (over, not seen yet)" in card._incidents(card.ask(str(client.base_url), "over"))
        assert client.post(f"/api/v1/incidents/{INCIDENT_ID}/seen").status_code == 200
        assert re.search(r"^over +over +- +ended ", said(command.runs_main), re.M)
        assert "no incident asks for you" in said(live.top_main, "--once")


def test_top_is_drawn_by_rich_and_a_terminal_obeys_no_name(client: httpx.Client) -> None:
    from rich.console import Console

    from fp8watch_agent.terminal.collector_client import Asking

    asking = Asking(str(client.base_url))
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(live.drawn(live.look(asking), asking.url, ""))
    asking.close()
    console.file.close()
    assert "tiny-lm blockwise" in console.export_text()
    assert text.plain("a\x1b[31mb\x07") == "a�[31mb�"
    assert text.spark({"steps": [0, 1, 2], "values": [1.0, None, 3.0], "nonfinite": [[1, "nan"]]}) == "▁✕█"
