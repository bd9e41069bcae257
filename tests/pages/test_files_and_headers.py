"""What travels with the pages: headers, scripts, plotly.js; nothing from elsewhere."""

from __future__ import annotations

import gzip
import re
from html.parser import HTMLParser

import httpx
from pages.synthetic import FAULT_SITE, INCIDENT_ID

PAGES = (
    "/",
    "/runs/demo-inf",
    f"/runs/demo-inf/sites/{FAULT_SITE}",
    f"/runs/demo-inf/sites/{FAULT_SITE}/tile-map",
    f"/incidents/{INCIDENT_ID}",
    "/runs/nope",
)
POLICY = (
    "default-src 'self'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "connect-src 'self'; frame-ancestors 'none'"
)


def test_every_answer_carries_the_policy(client: httpx.Client) -> None:
    for path in (*PAGES, "/api/v1/runs", "/favicon.ico", "/no/such/route"):
        headers = client.get(path).headers
        assert headers["content-security-policy"] == POLICY
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"


class Tags(HTMLParser):
    """Every tag of a page with its attributes."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_pages_hold_no_inline_script_and_nothing_from_elsewhere(client: httpx.Client) -> None:
    for path in PAGES:
        for tag, attributes in Tags(client.get(path).text).found:
            assert tag != "script" or attributes.get("src"), path
            assert not [name for name in attributes if name.startswith("on")], path
            for url in (attributes.get("src"), attributes.get("href")):
                assert url is None or (url.startswith(("/", "?", "#")) and not url.startswith("//")), url


def test_files_are_immutable_and_their_address_is_their_content(client: httpx.Client) -> None:
    html = client.get("/runs/demo-inf").text
    urls = re.findall(r'(?:src|href)="(/(?:static|assets)/[^"]+)"', html)
    assert len(urls) >= 5
    for url in urls:
        answer = client.get(url)
        assert answer.status_code == 200
        assert "immutable" in answer.headers["cache-control"]
        assert answer.headers.get("content-encoding") == "gzip" or len(answer.content) < 1500
    static = next(u for u in urls if u.endswith("page.js"))
    old = re.sub(r"/static/\w+/", "/static/0000/", static)
    assert client.get(old).headers["cache-control"] == "no-cache"


def test_plotly_comes_after_the_page_and_compressed(client: httpx.Client) -> None:
    html = client.get("/runs/demo-inf").text
    tag = re.search(r'<script type="module" src="[^"]+" data-plotly="([^"]+)"', html)
    assert tag is not None
    assert html.count(tag[1]) == 1, "no tag that a browser would follow before it has painted"
    with client.stream("GET", tag[1], headers={"accept-encoding": "gzip"}) as answer:
        raw = b"".join(answer.iter_raw())
    assert len(raw) < 1_700_000
    assert len(gzip.decompress(raw)) > 3_000_000
    plain = client.get(tag[1], headers={"accept-encoding": "identity"})
    assert "content-encoding" not in plain.headers
    assert gzip.decompress(raw) == plain.content


def test_no_path_leads_out_of_the_folder(client: httpx.Client) -> None:
    for path in ("/static/0/..%2Froutes.py", "/static/0/routes.py", "/assets/plotly.py", "/static/0/"):
        assert client.get(path).status_code == 404


def test_theme_in_the_address_is_there_before_any_script(client: httpx.Client) -> None:
    assert '<html lang="en" data-theme="light">' in client.get("/?theme=light").text
    assert '<html lang="en">' in client.get("/?theme=%22onload%3D").text
