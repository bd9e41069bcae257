"""A report that goes elsewhere holds nothing that its user named."""

from __future__ import annotations

from pathlib import Path

from pages import synthetic
from pages.collector import make_app, serving
from pages.synthetic import INCIDENT_ID

from fp8watch_server.detect.remedies import without_batch

BATCH = "s3://acme-corpus/clinic's/part-7"


def test_names_of_batches_logged_scalars_and_modules_that_were_left_out_are_replaced(tmp_path: Path) -> None:
    app = make_app(tmp_path)
    said = {"left_out": "acmehead.secretrouter (too narrow)"}
    with serving(app) as client:
        run = synthetic.Run(client, "r", "r", sites=synthetic.make_sites(1)).register(said=said)
        run.send(range(4), fault=False, logs={"acme_reward_v3": [1.0, 1.0, 9.0, 9.0]})
        synthetic.add_incident(
            app.state.engine, "r", INCIDENT_ID, mode="scalar-shift", first_step=2, last_step=3,
            title="acme_reward_v3 shifted from 1 to 9 at step 2", sites=[], place={},
            cause="acme_reward_v3 left its band; acmehead.secretrouter was not observed.",
            evidence=[{"field": "acme_reward_v3", "value": 9, "baseline": 1, "unit": "", "since_step": 2}],
            fix=[{"kind": "data", "text": f"Look at batch {BATCH!r}."}],
        )  # fmt: skip
        open_, closed = (
            client.get(f"/incidents/{INCIDENT_ID}/report.html", params={"redact": redact}).text for redact in ("", "1")
        )
    for name in ("acme_reward_v3", "acme-corpus", "secretrouter"):
        assert name in open_, name
    assert "acme" not in closed
    assert "secretrouter" not in closed
    assert "scalar1 shifted from 1 to 9" in closed
    assert "Look at batch" in closed


def test_a_batch_is_nameless_whatever_its_name() -> None:
    for name in ("7", "it's", 'a "b"', 'it\'s "both"', "line\nfeed"):
        assert without_batch(f"Look at batch {name!r}.") == "Look at batch 'batch'."
    assert without_batch("Find the batch.") == "Find the batch."
