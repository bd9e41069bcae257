"""The inbox over all runs: one row a cause, what people say of it, and the pages beside it."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from fastapi import FastAPI
from pages import synthetic
from pages.collector import make_app, serving
from pages.synthetic import INCIDENT_ID
from support.database import fresh_database

from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import make_engine, writing
from fp8watch_server.incidents.command import main as rules
from fp8watch_server.store import cause_list
from fp8watch_server.store.cause_list import Wanted

AGAIN_ID, OTHER_ID, TODAY_ID = "0" * 31 + "8", "0" * 31 + "9", "0" * 31 + "7"


@pytest.fixture(params=["sqlite", "postgresql"])
def app(request: pytest.FixtureRequest, tmp_path: Any) -> Iterator[FastAPI]:
    """The same cause in two runs, and another one that was seen; a run without any, behind two that prove nothing."""
    with fresh_database(request.param) as url:
        app = make_app(tmp_path, url)
        engine = app.state.engine
        with serving(app) as client:
            sites = [s for s in synthetic.make_sites(3) if s.module == synthetic.FAULT_MODULE]
            for k, run_id in enumerate(("demo-inf", "older", "clean")):
                run = synthetic.Run(client, run_id, f"lm {run_id}", sites=sites, session=f"{k}" * 32).register()
                run.send(range(88, 93), fault=k == 0, ended=True)
                if k == 0:
                    run.send_maps([synthetic.FAULT_STEP], [run.site(synthetic.FAULT_MODULE)])
            short = synthetic.Run(client, "short", "lm not as far", sites=sites, session="9" * 32).register()
            short.send(range(3), fault=False, ended=True)
            others = [s for s in synthetic.make_sites(1) if s.module != synthetic.FAULT_MODULE]
            blind = synthetic.Run(client, "blind", "lm not looked there", sites=others, session="8" * 32).register()
            blind.send(range(88, 93), fault=False, ended=True)
        synthetic.add_incident(engine, "demo-inf", INCIDENT_ID)
        over = {"status": "resolved", "resolved_at": time.time() - 500, "opened_at": time.time() - 900}
        place = {"module": "layers.7.mlp.down_proj", "operand": "input"}
        synthetic.add_incident(engine, "older", AGAIN_ID, place=place, owner="ann", **over)
        synthetic.add_incident(
            engine, "older", OTHER_ID, mode="bad-batch", title="Odd", place={}, severity="info", **over
        )
        with writing(engine) as conn:
            created = {"older": 1.0, "demo-inf": 2.0, "short": 2.5, "blind": 2.7, "clean": 3.0}
            for run_id, at in created.items():
                conn.execute(sa.update(t.run).where(t.run.c.run_id == run_id).values(created_at=at))
            conn.execute(
                sa.update(t.session).where(t.session.c.run_id == "clean").values(facts={"amax_epsilon": 1e-12})
            )
        yield app
        engine.dispose()


def causes(app: FastAPI, **wanted: str) -> list[dict[str, Any]]:
    engine = make_engine(app.state.engine.url.render_as_string(hide_password=False))
    with engine.connect() as conn:
        found = cause_list.find(conn, Wanted(**wanted)).causes  # type: ignore[arg-type]
    engine.dispose()
    return found


def test_a_cause_is_one_row_over_runs_and_what_is_said_of_it_goes_to_all(app: FastAPI) -> None:
    first, second = causes(app)
    assert (first["num_runs"], first["num_incidents"], first["state"]) == (2, 2, "open")
    assert first["incident"]["id"] == INCIDENT_ID  # the one that asks, not the newest of all
    assert (second["incident"]["mode"], second["state"]) == ("bad-batch", "seen")
    for wanted in (
        {"q": "older inf"},
        {"q": "inf lm"},
        {"owner": "ann"},
        {"mode": "inf-laundering"},
        {"state": "unseen"},
    ):
        assert [c["cause_id"] for c in causes(app, **wanted)] == [first["cause_id"]], wanted
    assert causes(app, state="fixed") == causes(app, q="no such") == []

    of_cause = f"/api/v1/causes/{first['cause_id']}"
    with serving(app) as client:
        html = client.get("/incidents").text
        assert "<strong>1</strong> of 2 causes needs you" in html
        assert "layers.*.mlp.down_proj" in html
        assert f'data-post="{of_cause}/ack"' in html
        hit = re.search(r'<td class="n hit"><details.*?</details>', html, re.S)
        assert hit is not None
        assert set(re.findall(r'href="(/runs/[^"]*)"', hit[0])) == {"/runs/demo-inf", "/runs/older"}
        assert client.post(f"{of_cause}/ack").json()["num_changed"] == 1
        assert client.post(f"{of_cause}/assign", json={"owner": "bob"}).json()["num_changed"] == 2
        assert [client.post(f"{of_cause}/fixed").json()["num_changed"] for _ in range(2)] == [2, 0]
        states = {i: client.get(f"/api/v1/incidents/{i}").json() for i in (INCIDENT_ID, AGAIN_ID, OTHER_ID)}
        assert [(s["state"], s["owner"]) for s in states.values()] == [("fixed", "bob")] * 2 + [("seen", "")]
        assert client.post("/api/v1/causes/none/ack").status_code == 404
        assert client.post(f"{of_cause}/forget").status_code == 422


def test_an_incident_shows_its_cause_in_other_runs_and_what_helped(app: FastAPI) -> None:
    with serving(app) as client:
        said = client.post(
            f"/api/v1/incidents/{INCIDENT_ID}/comment", json={"text": "<b>the tokenizer</b>"}, auth=("eve", "x")
        )
        assert said.status_code == 200
        html = client.get(f"/incidents/{INCIDENT_ID}").text
        panel = re.search(r'<section class="panel" id="cause".*?</section>', html, re.S)
        assert panel is not None
        assert f'href="/incidents/{AGAIN_ID}"' in panel[0]
        assert 'href="/runs/clean"' in panel[0]
        assert re.search(r"amax_epsilon</td><td[^>]*>not set</td><td[^>]*>1e-12", panel[0])
        fix = re.search(r'id="helped">(.*?)</p>', html, re.S)
        assert fix is not None
        assert "<code>amax_epsilon</code>: not set → 1e-12" in fix[1]
        assert html.index('id="helped"') < html.index('<li><span class="chip kind">')  # before any other advice
        assert 'amax_epsilon not set → 1e-12, in <a href="/runs/clean">' in client.get("/incidents").text
        assert 'href="/compare?a=older&amp;b=demo-inf"' in html
        assert "by eve, &lt;b&gt;the tokenizer&lt;/b&gt;" in html
        assert client.post(f"/api/v1/incidents/{INCIDENT_ID}/comment", json={"text": ""}).status_code == 422
        tiles = client.get(f"/incidents/{INCIDENT_ID}/tiles.svg")
        assert (tiles.status_code, tiles.headers["content-type"]) == (200, "image/svg+xml")
        assert 'stroke="#ff7a45"' in tiles.text
        assert client.get(f"/incidents/{AGAIN_ID}/tiles.svg").status_code == 404


def test_a_picture_of_tiles_has_another_address_when_its_incident_moves(app: FastAPI) -> None:
    def address(client: httpx.Client) -> str:
        found = re.search(r'src="(/incidents/[^"]*tiles.svg[^"]*)"', client.get("/incidents").text)
        assert found is not None
        return found[1].replace("&amp;", "&")

    with serving(app) as client:
        before = address(client)
        assert client.get(before).headers["content-type"] == "image/svg+xml"
        with writing(app.state.engine) as conn:
            moved = sa.update(t.incident).where(t.incident.c.id == INCIDENT_ID)
            conn.execute(moved.values(updated_at=t.incident.c.updated_at + 5))
        after = address(client)
        assert after != before
        assert client.get(after).status_code == 200


def test_a_cause_that_came_back_shows_what_helped_the_last_time_and_what_is_here_now(
    app: FastAPI, tmp_path: Path
) -> None:
    later = make_app(tmp_path, app.state.engine.url.render_as_string(hide_password=False))
    with serving(later) as client:
        sites = [s for s in synthetic.make_sites(3) if s.module == synthetic.FAULT_MODULE]
        run = synthetic.Run(client, "today", "lm today", sites=sites, session="7" * 32).register()
        run.send(range(88, 93), ended=True)
        synthetic.add_incident(later.state.engine, "today", TODAY_ID)
        html = client.get(f"/incidents/{TODAY_ID}").text
        inbox = client.get("/incidents").text
    later.state.engine.dispose()
    fix = re.search(r'id="helped">(.*?)</p>', html, re.S)
    assert fix is not None
    words = re.sub(r"<[^>]+>", "", fix[1])
    assert words.startswith("Gone last time, perhaps by amax_epsilon: not set → 1e-12; here not set. ")
    assert "It broke at step 90 of demo-inf, and not in lm clean (clean), which came to step 92." in words
    assert "helped last time, perhaps: amax_epsilon not set → 1e-12, in" in inbox


def test_the_fix_of_last_time_says_who_closed_it(app: FastAPI) -> None:
    with serving(app) as client:
        assert client.post(f"/api/v1/incidents/{AGAIN_ID}/fixed", auth=("ann", "x")).status_code == 200
        assert client.post(f"/api/v1/incidents/{INCIDENT_ID}/fixed", auth=("eve", "x")).status_code == 200
        html = client.get(f"/incidents/{INCIDENT_ID}").text
    fix = re.search(r'id="helped">(.*?)</p>', html, re.S)
    assert fix is not None
    assert re.sub(r"<[^>]+>", "", fix[1]).startswith(
        "Fixed, perhaps by amax_epsilon: not set → 1e-12. Closed as fixed by eve. "
    )


@pytest.mark.parametrize(
    "why", ["what follows from others", "the run of another job", "a run that ends before the failure did"]
)
def test_what_is_no_evidence_is_not_said_to_have_helped(app: FastAPI, why: str) -> None:
    same = {"amax_epsilon": 0.0, "checkpoints": "39", "gemm_flops_observed": 0.9, "recipe": "blockwise"}
    with writing(app.state.engine) as conn:
        if why.startswith("what"):
            facts = {
                "older": same,
                "demo-inf": same,
                "clean": {**same, "checkpoints": "39 79", "gemm_flops_observed": 0.8},
            }
            for of, said in facts.items():
                conn.execute(sa.update(t.session).where(t.session.c.run_id == of).values(facts=said))
        elif why.startswith("the run"):
            conn.execute(sa.update(t.run).where(t.run.c.run_id == "clean").values(name="smoke test"))
        else:
            conn.execute(sa.update(t.incident).where(t.incident.c.id.in_([INCIDENT_ID, AGAIN_ID])).values(last_step=99))
    with serving(app) as client:
        assert 'id="helped"' not in client.get(f"/incidents/{INCIDENT_ID}").text
        assert "perhaps" not in client.get("/incidents").text


def test_no_setting_of_fp8_has_helped_where_fp8_was_not_the_cause(app: FastAPI) -> None:
    """The learning rate of the step may have."""
    with writing(app.state.engine) as conn:
        conn.execute(sa.update(t.incident).values(verdict="shared"))
    with serving(app) as client:
        assert "perhaps" not in client.get("/incidents").text
        assert 'id="helped"' not in client.get(f"/incidents/{INCIDENT_ID}").text
    with writing(app.state.engine) as conn:
        c = t.scalar.c
        for of, lr in (("demo-inf", 6e-2), ("clean", 2e-3)):
            conn.execute(sa.update(t.scalar).where(c.run_id == of, c.step == 90).values(lr=lr, lr_class=0))
    with serving(app) as client:
        html = client.get(f"/incidents/{INCIDENT_ID}").text
        assert "<code>learning rate</code>: 0.06 → 0.002. " in html
        assert "amax_epsilon" not in html


@pytest.mark.parametrize(("verdict", "run_id"), [("fp8", "blind"), ("unknown", "blind"), ("shared", "")])
def test_a_later_run_that_kept_the_layer_out_of_fp8_is_what_helped_unless_fp8_was_not_the_cause(
    app: FastAPI, verdict: str, run_id: str
) -> None:
    others = f"lm_head (output head); x.{synthetic.FAULT_MODULE} (filter_fn); "
    with writing(app.state.engine) as conn:
        conn.execute(sa.update(t.incident).where(t.incident.c.id == INCIDENT_ID).values(verdict=verdict))
        for of, facts in (
            ("blind", {"left_out": f"{others}{synthetic.FAULT_MODULE} (filter_fn)", "lr": 1}),
            ("clean", {"left_out": others}),
        ):
            conn.execute(sa.update(t.session).where(t.session.c.run_id == of).values(facts=facts))
    with serving(app) as client:
        html = client.get(f"/incidents/{INCIDENT_ID}").text
        inbox = client.get("/incidents").text
    fix = re.search(r'id="helped">(.*?)</p>', html, re.S)
    assert (fix is not None) == (run_id == "blind")
    if fix is not None:
        assert 'href="/runs/blind"' in fix[1]
        words = re.sub(r"<[^>]+>", "", fix[1])
        assert "perhaps by keeping the layer out of FP8 (filter_fn); lr: not set → 1. " in words, words
    assert ("perhaps: the layer left FP8 (filter_fn), and more, in" in inbox) == (run_id == "blind")
    assert ("The layer left FP8 there (filter_fn), so that it could not." in html) == (run_id == "blind")


def test_a_layer_whose_reason_was_cut_off_left_fp8_all_the_same(app: FastAPI) -> None:
    cut = f"lm_head (output head); {synthetic.FAULT_MODULE} (own forw"
    with writing(app.state.engine) as conn:
        conn.execute(sa.update(t.session).where(t.session.c.run_id == "blind").values(facts={"left_out": cut}))
    with serving(app) as client:
        html = client.get(f"/incidents/{INCIDENT_ID}").text
    assert "keeping the layer out of FP8 (for a reason that was cut off). " in html


def test_false_alarms_are_kept_counted_and_listed(
    app: FastAPI, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = app.state.engine.url.render_as_string(hide_password=False)
    assert rules(["false-alarms", "--database-url", url]) == 0
    assert "no incident was marked" in capsys.readouterr().out
    with serving(app) as client:
        assert client.post(f"/api/v1/incidents/{INCIDENT_ID}/false-alarm").json()["state"] == "false-alarm"
        counted = client.get("/metrics").text
    assert 'fp8watch_false_alarms{mode="inf-laundering",run="demo-inf",severity="critical"} 1.0' in counted
    assert rules(["false-alarms", "--database-url", url]) == 0
    out = capsys.readouterr().out
    assert "num_inf 1 (usual 0); amax_max inf (usual 9.2)" in out
    assert out.endswith("inf-laundering: 1\n")
    absent = tmp_path / "none" / "at" / "all.db"
    assert rules(["false-alarms", "--database-url", f"sqlite:///{absent}"]) == 2
    assert "is not there; name another with --database-url" in capsys.readouterr().err
    assert not absent.parent.exists()  # looking makes nothing


def test_pages_beside_it(app: FastAPI) -> None:
    batch = {"run_id": "clean", "session": "2" * 32}
    with serving(app) as client:
        assert 'class="headline calm"' in client.get("/collector").text
        client.post("/api/v1/silences", json={"duration_s": 60, "mode": "bad-batch", "comment": "<i>"})
        silences = client.get("/silences").text
        assert "bad-batch" in silences
        assert "&lt;i&gt;" in silences
        books = client.get("/runbooks").text
        assert 'href="/runbooks/inf-laundering">Inf laundered by the cast' in books
    with writing(app.state.engine) as conn:
        b = t.hot_batch.c
        where = (b.run_id == batch["run_id"], b.session == batch["session"])
        conn.execute(sa.update(t.hot_batch).where(*where).values(detected=t.BATCH_FAILED, detect_error="<it broke>"))
    with serving(app) as client:
        html = client.get("/collector").text
    assert "The detectors broke on 1 batches" in html
    assert "&lt;it broke&gt;" in html


def test_an_empty_inbox_says_so(tmp_path: Any) -> None:
    with serving(make_app(tmp_path)) as client:
        assert "No incident so far." in client.get("/incidents").text
        for odd in ("?state=odd&page=x", "?page=9999999", "?q=%01%25"):
            assert isinstance(client, httpx.Client)
            assert client.get(f"/incidents{odd}").status_code == 200
