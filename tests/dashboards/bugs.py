"""What is broken on purpose in /metrics, and the test that sees it."""

from __future__ import annotations

from support.planted import Bug

D = "tests/dashboards"
PAGE = f"{D}/test_metrics_page.py"

BUGS = [
    Bug(
        "the runs that are left out are the same at each scrape",
        "observability.metrics:FleetCollector._runs",
        ".order_by(sa.case((goes_on, 0), else_=1), r.created_at.desc(), r.run_id)",
        ".order_by(r.last_seen_at.desc())",
        f"{PAGE}::test_what_is_left_out_stays_left_out_whichever_run_was_heard_of_last",
    ),
    Bug(
        "a run that has ended takes no room of one that goes on",
        "observability.metrics:FleetCollector._runs",
        "sa.case((goes_on, 0), else_=1), ",
        "",
        f"{PAGE}::test_what_is_left_out_stays_left_out_whichever_run_was_heard_of_last",
    ),
    Bug(
        "a contact point that is named is there",
        "dashboards/grafana/examples/policies.yml",
        "    name: oncall\n",
        "    name: grafana-default-email\n",
        f"{D}/test_provisioning.py::test_every_contact_point_that_is_named_is_made[examples]",
    ),
]
