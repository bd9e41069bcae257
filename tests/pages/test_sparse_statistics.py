"""A run with statistics on each 48th step: what a person reads of it. A step without a record was not measured."""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx
import pytest
from pages import synthetic
from pages.collector import make_app, serving
from pages.synthetic import SPARSE_MODULE


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A collector that holds the sparse run."""
    app = make_app(tmp_path_factory.mktemp("sparse"))
    with serving(app) as client:
        synthetic.sparse_run(client, app.state.engine)
        yield client


def test_worst_sites_are_shown_at_the_step_where_each_was_measured_last(sparse: httpx.Client) -> None:
    html = sparse.get("/runs/sparse").text
    rows = re.findall(r"<tr[^>]*>\s*<td><a class=\"rowlink\".*?</tr>", html, re.S)
    assert len(rows) == 12
    assert all('<td class="n muted">48</td>' in row for row in rows)
    assert "at the step where it was measured last" in html


def test_a_measurement_far_behind_the_newest_step_is_found(tmp_path_factory: pytest.TempPathFactory) -> None:
    with serving(make_app(tmp_path_factory.mktemp("far"))) as client:
        run = synthetic.Run(client, "far", "far", sites=synthetic.make_sites(1)).register()
        broken = run.site(SPARSE_MODULE)
        for first in (0, 5_000):
            run.send(range(first, first + 5), keep=lambda t, s: t == 2 or (t == 5_001 and s is broken))
        html = client.get("/runs/far").text
        shown = re.findall(r'<td class="n muted">(\d+)</td>', html)
        of_site = client.get(f"/runs/far/sites/{run.sites[0].id}").text
    assert sorted(set(shown)) == ["2", "5001"]
    assert 'title="step 2"' in of_site


def test_a_field_of_an_older_step_says_its_step(tmp_path_factory: pytest.TempPathFactory) -> None:
    def counts_only(steps: object, rows: object) -> None:
        rows["measured"][10 * 35 :] = 1  # type: ignore[index]

    with serving(make_app(tmp_path_factory.mktemp("partial"))) as client:
        run = synthetic.Run(client, "partial", "partial", sites=synthetic.make_sites(1)).register()
        run.send(range(12), change=counts_only, keep=lambda t, s: t in (0, 11))
        row = re.search(r"<tr[^>]*>\s*<td><a class=\"rowlink\".*?</tr>", client.get("/runs/partial").text, re.S)
    assert row is not None
    assert '<td class="n muted">11</td>' in row[0]
    assert row[0].count('title="measured at step 0">@0<') == 2  # tile SQNR and the largest amax


def test_run_page_says_how_to_log_what_was_not(sparse: httpx.Client, client: httpx.Client) -> None:
    html = sparse.get("/runs/sparse").text
    assert "gradient norm not logged: <code>watch.log(grad_norm=...)</code>" in html
    assert "learning rate not logged: <code>watch.log(lr=...)</code>" in html
    assert "not logged" not in client.get("/runs/demo-inf").text
