"""What a person reads before any script has run."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from pages import synthetic
from pages.synthetic import FAULT_MODULE, FAULT_SITE, INCIDENT_ID

from fp8watch_server.db import schema
from fp8watch_server.db.dialect import writing

SITE = f"/runs/demo-inf/sites/{FAULT_SITE}"


def text_of(html: str) -> str:
    """The page without its tags, spaces collapsed."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html))


def page(client: httpx.Client, path: str) -> str:
    answer = client.get(path)
    assert answer.status_code == 200, answer.text[:400]
    assert answer.headers["content-type"].startswith("text/html")
    return answer.text


def test_runs_page_names_status_step_loss_recipe_and_open_incidents(client: httpx.Client) -> None:
    html = page(client, "/")
    row = next(r for r in re.findall(r"<tr[ >].*?</tr>", html, re.S) if "tiny-lm blockwise" in r)
    words = text_of(row)
    for expected in ("running", "119", "blockwise", "reference", "critical", "inf-laundering"):
        assert expected in words
    assert f'href="/incidents/{INCIDENT_ID}"' in row
    assert '<svg class="spark"' in row


def test_runs_page_of_an_empty_collector_says_what_to_do(tmp_path_factory: pytest.TempPathFactory) -> None:
    from pages.collector import make_app, serving

    with serving(make_app(tmp_path_factory.mktemp("empty"))) as client:
        html = page(client, "/")
    assert "No runs yet" in html
    assert "fp8watch.attach(model)" in html


def test_run_page_shows_the_incident_with_place_and_fix_on_top(client: httpx.Client) -> None:
    html = page(client, "/runs/demo-inf")
    card = re.search(r'<a class="card incident critical".*?</a>', html, re.S)
    assert card is not None
    words = text_of(card[0])
    for expected in ("step 90", FAULT_MODULE, "input · fprop", "tile (131, 3)", "Clip or mask"):
        assert expected in words
    assert html.index("Open incidents") < html.index("Health of layers") < html.index("Worst sites now")


def test_worst_sites_put_non_finite_first_and_link_to_site_and_step(tmp_path_factory: pytest.TempPathFactory) -> None:
    from pages.collector import make_app, serving

    with serving(make_app(tmp_path_factory.mktemp("worst"))) as client:
        run = synthetic.Run(client, "r", "r").register()
        run.send(range(synthetic.FAULT_STEP - 3, synthetic.FAULT_STEP + 1))
        html = page(client, "/runs/r")
    rows = re.findall(r"<tr class=\"bad\">.*?</tr>|<tr>\s*<td><a class=\"rowlink\".*?</tr>", html, re.S)
    assert FAULT_MODULE in rows[0]
    assert f'href="/runs/r/sites/{FAULT_SITE}?step={synthetic.FAULT_STEP}"' in rows[0]
    assert '<span class="nonfinite">1</span>' in rows[0]
    assert "layers.2.mlp.down_proj" not in rows[1]


def test_worst_sites_begin_with_what_an_open_incident_names(tmp_path_factory: pytest.TempPathFactory) -> None:
    from pages.collector import make_app, serving

    def all_nan(steps: Any, rows: Any) -> None:
        rows["num_nan"][:] = 5
        rows["measured"][:] = 1  # counts only: SQNR is of before

    app = make_app(tmp_path_factory.mktemp("named"))
    with serving(app) as client:
        run = synthetic.Run(client, "n", "n").register()
        run.send(range(3), fault=False)
        assert "Nothing raised in 3 steps, 105 sites, each step." in page(client, "/runs/n")
        run.send(range(3, 5), fault=False, change=all_nan)
        in_flow = sorted(run.sites, key=lambda s: s.order)
        assert named_first(page(client, "/runs/n")) == str(in_flow[0].id)  # not the one that was worst before
        synthetic.add_incident(app.state.engine, "n", INCIDENT_ID)
        html = page(client, "/runs/n")
        assert named_first(html) == str(FAULT_SITE)
        assert f'class="named critical" href="/incidents/{INCIDENT_ID}"' in html
        over = {"status": "resolved", "resolved_at": 1.0, "seen_at": None}
        with writing(app.state.engine) as conn:
            conn.execute(sa.update(schema.incident).values(over))
        assert named_first(page(client, "/runs/n")) == str(FAULT_SITE), "over, and nobody has seen it"
        assert client.post(f"/api/v1/incidents/{INCIDENT_ID}/resolve").status_code == 200
        assert named_first(page(client, "/runs/n")) == str(in_flow[0].id)


def named_first(html: str) -> str:
    """The site in the first row of the worst ones."""
    found = re.search(r'class="rowlink" href="/runs/n/sites/(\d+)', html)
    assert found is not None
    return found[1]


def test_run_without_loss_says_how_to_give_it(tmp_path_factory: pytest.TempPathFactory) -> None:
    from pages.collector import make_app, serving

    def no_loss(steps, rows):  # type: ignore[no-untyped-def]
        steps["present"] = 4

    with serving(make_app(tmp_path_factory.mktemp("noloss"))) as client:
        run = synthetic.Run(client, "r", "r", sites=synthetic.make_sites(1)).register()
        run.send(range(4), change=no_loss)
        assert "watch.log(loss=...)" in page(client, "/runs/r")


def test_site_page_links_siblings_tile_map_and_incident(client: httpx.Client) -> None:
    html = page(client, f"{SITE}?step=90")
    assert f'href="{SITE}/tile-map?step=90"' in html
    assert f'href="/incidents/{INCIDENT_ID}"' in html
    for operand, direction, _ in synthetic.OPERANDS:
        assert f'/sites/{synthetic.site_id(FAULT_MODULE, operand, direction)}?step=90"' in html
    words = text_of(html)
    for expected in ("256 × 768", "1 × 128", "E4M3", "power of two", "fprop"):
        assert expected in words


def test_tile_map_page_lists_the_broken_tile_with_its_elements(client: httpx.Client) -> None:
    html = page(client, f"{SITE}/tile-map?step=90")
    row = re.search(r'<tr><td><a class="mono" href="\?step=90.*?</tr>', html, re.S)
    assert row is not None
    words = text_of(row[0])
    for expected in ("(131, 3)", "row 131, columns 384–511", "inf", "sentinel", "+Inf", "2^0"):
        assert expected in words
    assert "No tile is non-finite" in page(client, f"{SITE}/tile-map?step=89")


def test_tile_map_without_a_step_shows_the_newest(client: httpx.Client) -> None:
    assert 'data-step="94"' in page(client, f"{SITE}/tile-map")


def test_steps_of_a_map_are_those_that_its_rank_has(tmp_path_factory: pytest.TempPathFactory) -> None:
    from pages.collector import make_app, serving

    def steps_of(html: str) -> tuple[str, str]:
        found = re.search(r'data-steps="([^"]*)" data-rank="(\d+)"', html)
        assert found is not None
        return found[1], found[2]

    with serving(make_app(tmp_path_factory.mktemp("ranks"))) as client:
        for rank, steps in ((0, [1, 2]), (3, [2, 5])):
            run = synthetic.Run(client, "r", "r", sites=synthetic.make_sites(1), session=f"{rank}" * 32, rank=rank)
            run.register(world_size=4)
            run.send(range(6))
            run.send_maps(steps, [run.sites[0]])
        path = f"/runs/r/sites/{run.sites[0].id}/tile-map"
        assert steps_of(page(client, path)) == ("[2, 5]", "3")  # the newest, of whoever has it
        assert steps_of(page(client, f"{path}?step=2")) == ("[1, 2]", "0")
        assert steps_of(page(client, f"{path}?step=2&rank=3")) == ("[2, 5]", "3")
        assert client.get(f"{path}?step=5&rank=0").status_code == 404


def test_tile_map_of_a_quiet_step_leads_to_the_step_and_the_tile_that_broke(client: httpx.Client) -> None:
    html = page(client, f"{SITE}/tile-map?step=94")
    assert "No tile is non-finite" in html
    seen = re.search(r'<p class="seen">.*?</p>', html, re.S)
    assert seen is not None
    assert 'href="?step=90&amp;tile=131,3">step 90, tile (131, 3)</a>' in seen[0]
    assert f'href="/incidents/{INCIDENT_ID}"' in seen[0]


def test_incident_page_says_what_where_since_when_why_and_what_to_change(client: httpx.Client) -> None:
    words = text_of(page(client, f"/incidents/{INCIDENT_ID}"))
    for expected in (
        "One Inf in the input of layers.2.mlp.down_proj was stored as 448",
        "FP8 is the cause",
        "(131, 3)",
        "(131, 401)",
        "An Inf reached the quantiser",
        "FP8_QUANT_FWD_INP_AMAX_EPS=1e-12",
        "+Inf",
        "31.6 dB",
        "nan-in-activation",
        "Acknowledge",
        "Resolve",
    ):
        assert expected in words, expected


def test_incident_page_links_to_site_and_to_the_very_tile(client: httpx.Client) -> None:
    html = page(client, f"/incidents/{INCIDENT_ID}")
    assert f'href="{SITE}?step=90"' in html
    assert f"{SITE}/tile-map?step=90&amp;tile=131,3" in html


def test_incident_of_the_whole_run_has_a_page_too(
    client: httpx.Client, tmp_path_factory: pytest.TempPathFactory
) -> None:
    from pages.collector import make_app, serving

    app = make_app(tmp_path_factory.mktemp("whole"))
    with serving(app) as own:
        run = synthetic.Run(own, "r", "r", sites=synthetic.make_sites(1)).register()
        run.send(range(4))
        evidence = [{"field": "loss", "value": "nan", "baseline": 2.4, "unit": "", "since_step": 3}]
        place = {"ranks": [0], "module": None, "gemm": None, "operand": None, "direction": None, "tile": None}
        synthetic.add_incident(
            app.state.engine, "r", "a" * 32, mode="nan-in-loss", title="NaN born in the loss", verdict="shared",
            place=place, sites=[], num_sites=0, evidence=evidence, fix=[], alternatives=[], first_step=3, last_step=3,
        )  # fmt: skip
        words = text_of(page(own, f"/incidents/{'a' * 32}"))
    assert "Not FP8: BF16 would do the same" in words
    assert "whole run" in words
    assert "NaN" in words


def test_non_finite_values_are_written_on_every_page(client: httpx.Client) -> None:
    row = next(r for r in re.findall(r"<tr[ >].*?</tr>", page(client, "/"), re.S) if "nan-everywhere" in r)
    assert '<span class="nonfinite">NaN</span>' in row
    assert all(f"<title>{what}</title>" in row for what in ("NaN", "+Inf", "−Inf"))
    assert '<span class="nonfinite">NaN</span>' in page(client, "/runs/demo-nan")
    first = synthetic.make_sites(1)[0].id
    assert page(client, f"/runs/demo-nan/sites/{first}")


def test_acknowledged_and_resolved_incidents_offer_no_such_button(tmp_path_factory: pytest.TempPathFactory) -> None:
    from pages.collector import make_app, serving

    app = make_app(tmp_path_factory.mktemp("ack"))
    with serving(app) as client:
        run = synthetic.Run(client, "demo-inf", "small", sites=synthetic.make_sites(1)).register()
        run.send(range(3))
        synthetic.add_incident(app.state.engine, run.run_id, INCIDENT_ID)
        assert client.post(f"/api/v1/incidents/{INCIDENT_ID}/ack").status_code == 200
        html = page(client, f"/incidents/{INCIDENT_ID}")
        assert 'data-act="ack"' not in html
        assert 'data-act="resolve"' in html
        assert client.post(f"/api/v1/incidents/{INCIDENT_ID}/resolve").status_code == 200
        html = page(client, f"/incidents/{INCIDENT_ID}")
        assert set(re.findall('data-act="([^"]*)"', html)) == {"fixed", "false-alarm"}
        assert "Open incidents" not in page(client, "/runs/demo-inf")
        assert 'class="card incident critical resolved"' in page(client, "/runs/demo-inf")
        assert "1 resolved, seen: inf-laundering" in text_of(page(client, "/"))
        assert "Nothing raised in" not in text_of(page(client, "/runs/demo-inf"))


def test_after_a_restart_from_step_0_now_is_the_newer_attempt(tmp_path_factory: pytest.TempPathFactory) -> None:
    from pages.collector import make_app, serving

    def loss_is(value: float) -> Any:
        return lambda steps, rows: steps["loss"].fill(value)

    with serving(make_app(tmp_path_factory.mktemp("again"))) as client:
        run = synthetic.Run(client, "r", "r").register()
        run.send(range(500, 504), fault=False, change=loss_is(float("nan")))
        run.session, run.seq = "b" * 32, 0
        run.register()
        run.send(range(4), fault=False, change=loss_is(1.625))
        for path in ("/", "/runs/r"):
            html = page(client, path)
            words = text_of(re.sub(r"<figure.*?</figure>", "", html, flags=re.S))  # charts show every step there is
            assert "1.625" in words
            assert "503" not in words  # the last step of the attempt before


def test_only_runbooks_that_exist_are_linked(client: httpx.Client) -> None:
    html = client.get(f"/incidents/{INCIDENT_ID}").text
    linked = set(re.findall(r'href="(/runbooks/[^"#]+)"', html))
    assert "/runbooks/nan-in-activation" in linked
    assert {client.get(path).status_code for path in linked} == {200}
    assert "<code>kernel-output-fault</code>" in html


def test_an_incident_shows_what_bf16_said(tmp_path_factory: pytest.TempPathFactory) -> None:
    from pages.collector import make_app, serving

    from fp8watch.diagnose.verdict import LayerPair, StepPair, judge

    said = judge(
        (StepPair(0, 2.5, 2.5), StepPair(1, float("nan"), 2.4)),
        (LayerPair("layers.0.<b>up", 0.02, None, 0.99, 0.9), LayerPair("layers.1.down", float("inf"), 1, None, None)),
        "delayed",
        "BF16",
    )
    app = make_app(tmp_path_factory.mktemp("comparison"))
    with serving(app) as client:
        synthetic.faulty_run(client, app.state.engine, 100)
        assert "What BF16 said" not in page(client, f"/incidents/{INCIDENT_ID}")
        said.send(INCIDENT_ID, str(client.base_url))
        html = page(client, f"/incidents/{INCIDENT_ID}")
        panel = re.search(r'<section class="panel" id="comparison"[^>]*>.*?</section>', html, re.S)
        assert panel is not None
        words = text_of(panel[0])
        for expected in ("What BF16 said", "2 steps of delayed", "from step 1 on the losses separate", "NaN", "0.99"):
            assert expected in words
        assert words.index("layers.1.down") < words.index("layers.0.")  # the worst first
        assert "<b>" not in panel[0]
        with pytest.raises(OSError, match="404"):
            said.send("nobody", str(client.base_url))
    with pytest.raises(OSError, match="not reached"):
        said.send(INCIDENT_ID, "http://127.0.0.1:9")
