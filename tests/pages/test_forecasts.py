"""Where a trend leads, on the page of its site and beside a logged scalar; nothing where there is no lasting one."""

from __future__ import annotations

import html
import re

import pytest
from pages import synthetic
from pages.collector import make_app, serving

MODULE = "layers.0.mlp.up_proj"


def test_a_lasting_trend_has_a_sentence_and_others_have_none(tmp_path_factory: pytest.TempPathFactory) -> None:
    with serving(make_app(tmp_path_factory.mktemp("ahead"))) as client:
        run = synthetic.Run(client, "ahead", "ahead", sites=synthetic.make_sites(1)).register()
        rising = run.site(MODULE)

        def rise(steps: object, rows: object) -> None:
            for i, step in enumerate(steps["step"]):  # type: ignore[index]
                row = rows[i * len(run.sites) + run.sites.index(rising)]  # type: ignore[index]
                row["num_underflow"] = row["num_nonzero"] * 0.01 * 2 ** (step / 100)  # 10 % at step 332

        for first in range(0, 200, 40):
            steps = range(first, first + 40)
            logs = {"max_attention_logit/layers.0": [8 * 2 ** (s / 100) for s in steps], "kl": [2.0**s for s in steps]}
            run.send(steps, change=rise, logs=logs)  # 100 at step 364
        of_site = client.get(f"/runs/ahead/sites/{rising.id}").text
        of_other = client.get(f"/runs/ahead/sites/{run.site(MODULE, 'grad_output').id}").text
        of_run = client.get("/runs/ahead").text
    said = re.search(r'id="forecast" data-live><p class="note">(.*?)</p>', of_site)
    assert said is not None
    words = r"Underflow: at the pace of steps 0–199 it passes 10 %, the limit of chronic-quantization-noise, in about 13\d steps \((\d+)–(\d+)\)\."
    interval = re.fullmatch(words, html.unescape(said[1]))
    assert interval is not None, said[1]
    assert int(interval[1]) < 133 < int(interval[2])
    assert 'id="forecast" data-live></div>' in of_other
    (logits,) = re.findall(r'<p class="hint forecast">(.*?)</p>', of_run)
    assert re.search(r"it passes 100, where softmax is one-hot, in about 16\d steps", logits)
