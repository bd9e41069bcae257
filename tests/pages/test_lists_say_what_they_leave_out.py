"""A list that is cut says how much is missing, and nothing counts what was cut."""

from __future__ import annotations

import re
from pathlib import Path

from pages import synthetic
from pages.collector import make_app, serving

from fp8watch_agent.fact_lists import MAX_FACT_CHARS
from fp8watch_server.pages.coverage import goes_on


def test_lists_of_modules_and_incidents_say_how_many_are_not_shown(tmp_path: Path) -> None:
    long = "; ".join(f"model.layers.{i}.self_attn.q_proj (filter_fn says no)" for i in range(64))[:MAX_FACT_CHARS]
    facts = {
        "not_taken": "; ".join(f"m{i} (3-D)" for i in range(60)) + "; and 7 more",
        "left_out": long,
        "silent": "w (einsum)",
        "not_called": "a; b; and 9 more",
    }
    app = make_app(tmp_path)
    with serving(app) as client:
        run = synthetic.Run(client, "lists", "lists", sites=synthetic.make_sites(1)).register(said=facts)
        run.send(range(3), fault=False)
        seen = {"status": "resolved", "seen_at": 1.0, "resolved_at": 1.0, "first_step": 1, "last_step": 1}
        for i in range(100):
            synthetic.add_incident(app.state.engine, "lists", f"{i:032x}", **seen)
        html = client.get("/runs/lists").text
        report = client.get(f"/incidents/{0:032x}/report.html").text
    of = {
        title: rest.partition("<h3>")[0]
        for title, rest in re.findall(r"<h3>([^<]*)</h3>(.*?)(?=<h3>|</section>)", html, re.S)
    }
    said = {title: re.findall(r'<p class="hint">(.*?)</p>', part) for title, part in of.items()}
    assert said["GEMMs not observed"] == ["and 27 more"]
    assert said["Not called in the first step"] == ["and 9 more"]
    assert of["Not called in the first step"].count("<li>") == 2
    assert said["Left in high precision"] == [
        "and perhaps others: attach names as many as fit into 2\u2009000 characters"
    ]
    assert said["Announced as observed, and silent"] == []
    assert "GEMMs not observed: 67 modules: m0, " in report
    assert '<p class="hint">and 40 more, by their causes in <a href="/incidents?q=lists">the inbox</a></p>' in html


def test_a_fact_without_room_for_one_more_of_its_items_may_go_on() -> None:
    item = "layers.0.up (3-D)"
    many = "; ".join([item] * ((MAX_FACT_CHARS + 2) // (len(item) + 2)))
    assert goes_on(many)
    assert not goes_on(many[: -2 * (len(item) + 2)])
    assert not goes_on(f"{many[:-14]}; and 3 more")  # which says so
    assert not goes_on("")
    assert not goes_on(None)
