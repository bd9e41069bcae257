"""Ways to a tile map lead to one that was kept."""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx
import pytest
from pages import synthetic
from pages.collector import make_app, serving

MODULE = "layers.0.mlp.up_proj"
SITE = synthetic.site_id(MODULE, "input", "rowwise")
OTHER = synthetic.site_id(MODULE, "input", "columnwise")
BARE = synthetic.site_id(MODULE, "weight", "rowwise")


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """Sixty steps, maps of two sites at two steps each."""
    with serving(make_app(tmp_path_factory.mktemp("way"))) as client:
        run = synthetic.Run(client, "r", "r", sites=synthetic.make_sites(1)).register()
        run.send(range(60), fault=False)
        run.send_maps([3, 4], [run.site(MODULE)])
        run.send_maps([7, 9], [run.site(MODULE, "input", "columnwise")])
        yield client


def test_the_button_of_a_site_leads_to_the_nearest_step_that_was_kept(client: httpx.Client) -> None:
    for asked, given, words in (
        ("?step=50", "?step=4", "step 4"),
        ("?step=3", "?step=3", "step 3"),
        ("", "", "2 steps"),
    ):
        html = client.get(f"/runs/r/sites/{SITE}{asked}").text
        button = re.search(
            r'<span id="to-map" data-live><a class="button primary" href="([^"]*)">Tile map <small>(.*?)</small>', html
        )
        assert button is not None
        assert button.groups() == (f"/runs/r/sites/{SITE}/tile-map{given}", words)
        assert client.get(button[1]).status_code == 200


def test_from_map_to_map_of_a_module_and_only_where_there_is_one(client: httpx.Client) -> None:
    html = client.get(f"/runs/r/sites/{SITE}/tile-map?step=4").text
    nav = html[html.index('class="siblings"') :].split("</nav>")[0]
    links = re.findall(r'href="([^"]*)"', nav)
    assert links == [f"/runs/r/sites/{SITE}/tile-map?step=4", f"/runs/r/sites/{OTHER}/tile-map?step=7"]
    assert all(client.get(link).status_code == 200 for link in links)
    assert nav.count("no map") == 3
    assert client.get(f"/runs/r/sites/{BARE}/tile-map?step=4").status_code == 404
