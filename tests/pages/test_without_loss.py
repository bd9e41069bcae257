"""A tile SQNR of +Inf says that nothing was lost: the best that there is, and no alarm."""

from __future__ import annotations

import re
from pathlib import Path

from pages import synthetic
from pages.collector import make_app, serving
from pages.lossless import lossless


def test_the_page_of_a_site_that_lost_nothing_says_so(tmp_path: Path) -> None:
    with serving(make_app(tmp_path)) as client:
        run = synthetic.Run(client, "r", "r", sites=synthetic.make_sites(1)).register()
        run.send(range(4), fault=False, change=lossless)
        html = client.get(f"/runs/r/sites/{run.sites[0].id}").text
    now = html[html.index('id="now"') :].split("</dl>")[0]
    said = re.search(r"<dt>Tile SQNR</dt><dd[^>]*>(.*?)</dd>", now)
    assert said is not None
    assert said[1] == '<span class="muted">no loss</span>'
    assert "nonfinite" not in now
