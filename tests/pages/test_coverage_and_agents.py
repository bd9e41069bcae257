"""What of a run is in FP8 and what is not and why; and how the agents of its ranks are."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from typing import Any

import httpx
import pytest
from pages import synthetic
from pages.collector import make_app, serving

from fp8watch_server.pages.coverage import agents, left_out
from fp8watch_server.pages.formatting import number
from fp8watch_server.pages.live import Topic, version
from fp8watch_server.store.rank_sessions import OfRanks


def words(html: str, panel: str) -> str:
    found = re.search(rf'<section class="panel" id="{panel}".*?</section>', html, re.S)
    assert found is not None
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", found[0]))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("lm_head (output head)", [("lm_head", "output head")]),
        (
            "a.b (17 × 3: not a multiple of 16 (K)); c (embedding)",
            [("a.b", "17 × 3: not a multiple of 16 (K)"), ("c", "embedding")],
        ),
        ("", []),
        (None, []),
        ("something else", [("something else", "")]),
    ],
)
def test_left_out_is_read_module_by_module(text: object, expected: list[tuple[str, str]]) -> None:
    assert left_out(text) == expected


def test_run_page_says_what_is_in_fp8_on_which_backend_and_what_is_not_and_why(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with serving(make_app(tmp_path_factory.mktemp("coverage"))) as client:
        run = synthetic.Run(client, "cover", "cover", sites=synthetic.make_sites(1)).register()
        facts = {
            "left_out": "lm_head (output head); <b>x (too small)",
            "configuration_warning": "E5M2 with <1,128>",
            "gradients_unseen": "2 processes share them",
            "gemm": "scaled_mm",
            "device": "NVIDIA <H200>",
        }
        session = {"rank": 0, "host": "node-1", "pid": 1, "recipe": "blockwise", "backend": "cpu", "facts": facts}
        assert client.put(f"/v1/runs/cover/sessions/{run.session}", json=session).status_code == 200
        run.send(range(3))
        html = client.get("/runs/cover").text
    said = words(html, "coverage")
    for expected in (
        "7 modules: codes are multiplied by torch._scaled_mm on NVIDIA &lt;H200&gt;",
        "Whether optimizers get the gradients that backward gave is not looked at: 2 processes share them.",
        "input rowwise E4M3 1×128 power of two blockwise reference 7",
        "weight rowwise E4M3 128×128",
    ):
        assert expected in said
    for expected in ("lm_head output head", "&lt;b&gt;x too small", "E5M2 with &lt;1,128&gt;"):
        assert expected in said
    assert "all well" in words(html, "agents")


@pytest.mark.parametrize(("num", "said_of"), [
    (0, "0 modules; 7 are observed, and compute as before"),
    (6, "6 modules: dequantised operands are multiplied in float32; 1 is observed, and computes as before"),
])  # fmt: skip
def test_what_is_only_observed_is_not_said_to_be_in_fp8(
    tmp_path_factory: pytest.TempPathFactory, num: int, said_of: str
) -> None:
    sites = synthetic.make_sites(1)
    in_fp8 = set(list(dict.fromkeys(s.module for s in sites))[:num])
    sites = [replace(s, recipe="blockwise" if s.module in in_fp8 else "observe") for s in sites]
    with serving(make_app(tmp_path_factory.mktemp("observed"))) as client:
        run = synthetic.Run(client, "watched", "watched", sites=sites).register()
        session = {
            "rank": 0,
            "host": "n",
            "pid": 1,
            "recipe": "blockwise",
            "backend": "cpu",
            "facts": {"gemm": "emulated"},
        }
        assert client.put(f"/v1/runs/watched/sessions/{run.session}", json=session).status_code == 200
        run.send(range(3))
        assert said_of in words(client.get("/runs/watched").text, "coverage")


def with_facts(client: httpx.Client, run: synthetic.Run, facts: dict[str, Any]) -> None:
    session = {"rank": 0, "host": "node-1", "pid": 1, "recipe": "observe", "backend": "cpu", "facts": facts}
    assert client.put(f"/v1/runs/{run.run_id}/sessions/{run.session}", json=session).status_code == 200


def test_run_page_names_the_gemms_that_are_not_observed_and_their_share(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with serving(make_app(tmp_path_factory.mktemp("share"))) as client:
        run = synthetic.Run(client, "moe", "moe", sites=synthetic.make_sites(1)).register()
        experts = "model.layers.*.mlp.experts.down_proj (3-D parameter [8, 96, 192], 24 %)"
        facts = {
            "gemm_flops_observed": 0.22,
            "not_taken": experts,
            "not_called": "a.b; c.*",
            "silent": "w (read by einsum)",
            "not_in_fp8": "layers.*.experts.up (inside a function whose backward is its own)",
            "silent_share": "67 % of the GEMM FLOPs were announced as observed and send nothing",
        }
        with_facts(client, run, facts)
        run.send(range(3))
        said = words(client.get("/runs/moe").text, "coverage")
        (session,) = client.get("/api/v1/runs/moe").json()["sessions"]
        with_facts(client, run, {"gemm_flops_observed": "nan"})
        hostile = words(client.get("/runs/moe").text, "coverage")
    assert "Observed: 22 % of the model's GEMM FLOPs" in said.replace("&#39;", "'")
    for expected in (
        "GEMMs not observed model.layers.*.mlp.experts.down_proj 3-D parameter [8, 96, 192], 24 %",
        "Not called in the first step a.b c.*",
        "Announced as observed, and silent w read by einsum",
        "67 % of the GEMM FLOPs were announced as observed and send nothing",
        "Announced as FP8, and in high precision A product with these does not compute in FP8, against what attach announced. "
        "layers.*.experts.up inside a function whose backward is its own",
    ):
        assert expected in said
    assert session["facts"] == facts
    assert "Observed:" not in hostile
    assert "Announced as FP8" not in hostile


def test_a_run_of_which_no_step_ends_is_visible_as_not_watching(tmp_path_factory: pytest.TempPathFactory) -> None:
    remedy = "no step has ended after 20 backward passes: call watch.step()"
    with serving(make_app(tmp_path_factory.mktemp("stuck"))) as client:
        run = synthetic.Run(client, "stuck", "stuck", sites=synthetic.make_sites(1)).register()
        before, listed_before = client.get("/runs/stuck").text, client.get("/").text
        with_facts(client, run, {"no_step_ended": remedy})
        empty, listed = client.get("/runs/stuck").text, client.get("/").text
        run.send(range(3))
        page = client.get("/runs/stuck").text
        with_facts(client, run, {"no_step_ended": ""})
        after, listed_after = client.get("/runs/stuck").text, client.get("/").text
    note, says = f'<p class="note warning">Attached, but {remedy}.</p>', f"Not watching: {remedy}."
    assert [note in html for html in (before, empty)] == [False, True]
    assert [says in html for html in (page, after)] == [True, False]
    assert 'class="headline warning"' in page
    assert "attached, no step has ended" in empty
    reason = '<span class="reason">not watching</span>'
    assert [(reason in html, remedy in html) for html in (listed_before, listed, listed_after)] == [
        (False, False),
        (True, True),
        (False, False),
    ]


def session_of(rank: int, **changes: Any) -> dict[str, Any]:
    """A session that is well."""
    health = {"acknowledged": 100.0, "queued": 0.0, "spooled": 0.0, "retries": 0.0, "internal_errors": 0.0}
    base: dict[str, Any] = {"rank": rank, "attempt": 1, "host": f"node-{rank}", "ended": False, "versions": {}}
    base |= {"num_late_steps": 0, "last_late_step": None}
    return {**base, "last_seen_at": time.time(), **changes, "health": health | changes.get("health", {})}


def test_ranks_that_need_somebody_come_first_and_are_counted() -> None:
    sessions = [session_of(rank) for rank in range(64)]
    sessions[40] = session_of(40, health={"dropped_ring_full": 17.0})
    sessions[50] = session_of(50, last_seen_at=time.time() - 600)
    sessions[51] = session_of(51, last_seen_at=time.time() - 600, ended=True)  # it is over, and that is well
    sessions[52] = session_of(52, health={"internal_errors": 2.0})
    sessions[54] = session_of(
        54, health={"overhead_ratio": 0.3}
    )  # steps of a small model are short: no fault of the agent
    got = agents({"world_size": 66}, OfRanks(sessions, len(sessions)))
    assert [r["rank"] for r in got["rows"][:3]] == [40, 50, 52]
    assert (got["num_unwell"], got["num_ranks"], got["num_missing"], got["num_more"]) == (3, 64, 2, 32)
    assert got["rows"][0]["dropped"] == {"ring_full": 17}
    assert got["rows"][1]["status"] == "silent"
    why = [r["why"] for r in got["rows"][:4]]
    assert why[0] == ["17 records lost (ring_full)"]
    assert why[1] == ["silent, last seen 10 min ago"]
    assert why[2:] == [["2 errors inside the agent"], []]


@pytest.mark.parametrize("ended", [True, False])
def test_records_on_a_disk_are_told_of_the_moment_that_is_known(ended: bool) -> None:
    """`fp8watch sync` sends the health that was written with them: behind it they wait no more."""
    spooled = session_of(0, health={"spooled": 16218.0}, ended=ended)
    [row] = agents({"world_size": 1}, OfRanks([spooled], 1))["rows"]
    said = "lay on its disk when it ended; fp8watch sync sends what has not come" if ended else "wait on its disk"
    assert row["why"] == [f"{number(16218)} records {said}"]


def test_hostile_health_is_no_stack_trace() -> None:
    odd = session_of(0, health={"acknowledged": float("nan"), "dropped_x": float("inf"), "overhead_ratio": "nan"})
    got = agents({"world_size": None}, OfRanks([odd, {**session_of(1), "health": None}], 2))
    assert got["num_ranks"] == 2


def test_live_tells_of_what_changed_and_of_nothing_else(client: httpx.Client) -> None:
    """A first event with the version of the page, so that nothing between the page and the stream is lost."""
    html = client.get("/runs/demo-inf").text
    url, shown = re.search(r'data-watch="([^"]*)" data-version="(\w+)"', html).groups()  # type: ignore[union-attr]
    with client.stream("GET", url) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        lines = stream.iter_lines()
        got = [next(lines) for _ in range(6)]
    assert got[0] == "retry: 2000"
    assert f"data: {shown}" in got


def test_version_changes_with_steps_incidents_silences_and_silence_of_the_run(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    app = make_app(tmp_path_factory.mktemp("version"))
    with serving(app) as client:
        run = synthetic.Run(client, "v", "v", sites=synthetic.make_sites(1)).register()
        other = synthetic.Run(client, "w", "w", sites=synthetic.make_sites(1), session="1" * 32).register()
        of_run, of_incident, of_all = Topic("v"), Topic("v", synthetic.INCIDENT_ID), Topic()

        def now(topic: Topic, at: float | None = None) -> str:
            with app.state.engine.connect() as conn:
                return version(conn, topic, at)

        seen = {now(of_run)}

        def changed(topic: Topic = of_run, at: float | None = None) -> bool:
            fresh = now(topic, at)
            known = fresh in seen
            seen.add(fresh)
            return not known

        assert not changed()
        before = now(of_all)
        other.send(range(2))
        assert not changed()  # another run is no business of this page
        assert now(of_all) != before
        run.send(range(2))
        assert changed()
        synthetic.add_incident(app.state.engine, "v", synthetic.INCIDENT_ID, sites=[], place={})
        assert changed()
        assert changed(of_run, time.time() + 1000)  # stalled: nothing came, and the page says so
        assert changed(of_incident)
        body = {"duration_s": 60, "run_id": "v"}
        assert client.post("/api/v1/silences", json=body).status_code == 201
        assert changed(of_incident)
        assert client.post(f"/api/v1/incidents/{synthetic.INCIDENT_ID}/ack").status_code == 200
        assert changed()
        assert changed(of_incident)
