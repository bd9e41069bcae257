"""Unknown things, steps beyond the data, names that attack: a page that says what is the matter and what to do."""

from __future__ import annotations

import re
import socket
from urllib.parse import quote

import httpx
import pytest
from pages import synthetic
from pages.synthetic import FAULT_SITE, HOSTILE, HOSTILE_ID

SITE = f"/runs/demo-inf/sites/{FAULT_SITE}"


@pytest.mark.parametrize(
    ("path", "status", "says"),
    [
        ("/runs/nope", 404, "No such run"),
        ("/runs/nope/sites/1", 404, "No such run"),
        ("/runs/demo-inf/sites/12345", 404, "No such site"),
        ("/runs/demo-inf/sites/abc", 404, "No such site"),
        ("/runs/demo-inf/sites/99999999999999999999999999", 404, "No such site"),
        (f"{SITE}/tile-map?step=7", 404, "No tile map at step 7"),
        (f"{SITE}/tile-map?step=4000000000", 404, "No tile map at step 4000000000"),
        (f"{SITE}/tile-map?step=-1", 400, "That is not a step"),
        (f"{SITE}/tile-map?step=ten", 400, "That is not a step"),
        (f"{SITE}/tile-map?step=1{'0' * 40}", 400, "That is not a step"),
        (f"{SITE}/tile-map?step=90&rank=99999999999", 404, "No tile map"),
        (f"{SITE}?step=x", 400, "That is not a step"),
        ("/incidents/nope", 404, "No such incident"),
        ("/runbooks/nope", 404, "No such runbook"),
        ("/runbooks/..%2F..%2Fpyproject", 404, ""),
    ],
)
def test_what_is_not_there_gets_a_page_with_its_status(client: httpx.Client, path: str, status: int, says: str) -> None:
    answer = client.get(path)
    assert answer.status_code == status
    assert says in answer.text
    assert "Traceback" not in answer.text


def test_an_address_that_leads_nowhere_gets_a_page_where_a_person_asks(client: httpx.Client) -> None:
    person = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
    answer = client.get("/nope/<b>", headers=person)
    assert answer.status_code == 404
    assert answer.headers["content-type"].startswith("text/html")
    assert "No such page" in answer.text
    assert "<b>" not in answer.text
    for path, headers in (("/nope", {}), ("/api/v1/nope", person), ("/v1/nope", person)):
        assert client.get(path, headers=headers).headers["content-type"] == "application/problem+json"
    assert client.post("/nope", headers=person).status_code == 404


def test_problem_page_of_a_missing_step_links_the_nearest_ones(client: httpx.Client) -> None:
    html = client.get(f"{SITE}/tile-map?step=7").text
    assert f'href="{SITE}/tile-map?step=84"' in html


def test_site_without_a_map_says_how_to_get_one(client: httpx.Client) -> None:
    other = synthetic.make_sites()[0].id
    answer = client.get(f"/runs/demo-inf/sites/{other}/tile-map")
    assert answer.status_code == 404
    assert "tile_maps=&#34;all&#34;" in answer.text
    assert "no tile map" in client.get(f"/runs/demo-inf/sites/{other}").text


def test_run_without_data_says_so_and_looks_again_by_itself(client: httpx.Client) -> None:
    answer = client.get("/runs/demo-empty")
    assert answer.status_code == 200
    assert "no data yet" in answer.text
    assert re.search(r'data-watch="/live\?run=demo-empty" data-version="\w{16}" data-watch-reload', answer.text)


def test_a_mark_that_cannot_be_read_marks_nothing(client: httpx.Client) -> None:
    for tile in ("x", "1", "1,2,3", "-1,2", "9" * 400 + ",1"):
        answer = client.get(f"{SITE}/tile-map", params={"step": 90, "tile": tile})
        assert answer.status_code == 200
        assert "data-tile=" not in answer.text.split("data-tile-map")[1].split(">")[0]


def test_hostile_names_are_text_on_every_page(client: httpx.Client) -> None:
    run = f"/runs/{quote(HOSTILE.replace('/', '~'), safe='')}"
    prefix = HOSTILE + "/" + "x" * 400
    site = synthetic.make_sites(1, prefix=prefix)[0].id
    for path in ("/", run, f"{run}/sites/{site}", f"{run}/sites/{site}/tile-map", f"/incidents/{HOSTILE_ID}"):
        answer = client.get(path)
        assert answer.status_code == 200, path
        assert "<img src=x" not in answer.text
        assert "<script>" not in answer.text
        assert "&lt;script&gt;" in answer.text
        assert "javascript:" not in "".join(re.findall(r'href="([^"]*)"', answer.text))
        assert "z" * 300 not in answer.text
        assert "y" * 300 not in answer.text


def test_unknown_names_of_a_url_are_text_and_short(client: httpx.Client) -> None:
    answer = client.get(f"/runs/{quote(HOSTILE, safe='')}{'n' * 20_000}")
    assert answer.status_code == 404
    assert "<script>alert" not in answer.text
    assert len(answer.text) < 10_000


def test_a_name_of_a_million_characters_is_refused_with_the_rule(client: httpx.Client) -> None:
    """Wherever it comes in: when a run is registered, in an address, in what an address asks for."""
    name = "n" * 1_000_000
    answer = client.put("/v1/runs/million", json={"name": name, "recipe": "", "backend": "", "world_size": 1})
    assert answer.status_code == 422
    assert "length <= 4096" in answer.text
    assert client.get("/runs/million").status_code == 404
    host, port = client.base_url.host, client.base_url.port
    for path in (f"/runs/{name}", f"/runs/demo-inf?map={name}"):
        with socket.create_connection((host, port), timeout=20) as raw:
            raw.sendall(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
            said = b"".join(iter(lambda raw=raw: raw.recv(1 << 16), b""))
        assert said.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 404 ", b"HTTP/1.1 414 ", b"HTTP/1.1 431 ")), said[:80]
        assert b"Traceback" not in said
        assert len(said) < 10_000
    for query in (f"map={name[:60_000]}&operand={name[:2000]}", f"theme={name[:60_000]}", f"tile={name[:60_000]}"):
        assert client.get(f"/runs/demo-inf?{query}").status_code == 200


def test_a_run_that_has_ended_says_so_and_is_whole(client: httpx.Client) -> None:
    html = client.get("/runs/demo-nan").text
    assert 'data-status="ended"' in html
    assert '<span class="status ended">' in html
    assert 'id="health"' in html
    row = next(r for r in re.findall(r"<tr>.*?</tr>", client.get("/").text, re.S) if "demo-nan" in r)
    assert '<span class="status ended">' in row
    site = synthetic.make_sites(1)[0].id
    assert 'data-status="ended"' in client.get(f"/runs/demo-nan/sites/{site}").text


def test_a_run_id_may_be_a_path(tmp_path_factory: pytest.TempPathFactory) -> None:
    from pages.collector import make_app, serving

    with serving(make_app(tmp_path_factory.mktemp("path"))) as client:
        run = synthetic.Run(client, "team/exp 7%", "a path", sites=synthetic.make_sites(1)).register()
        run.send(range(3))
        runs = client.get("/").text
        href = re.search(r'href="(/runs/[^"]+)"', runs)
        assert href is not None
        html = client.get(href[1]).text
        site = re.search(r'href="(/runs/[^"]+/sites/\d+\?step=2)"', html)
        assert site is not None
        assert client.get(site[1]).status_code == 200
