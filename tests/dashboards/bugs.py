"""What is broken on purpose in /metrics, and the test that sees it."""

from __future__ import annotations

from support.planted import Bug

D = "tests/dashboards"
PAGE = f"{D}/test_metrics_page.py"

BUGS = [
    Bug(
        "the runs that are left out are the same at each scrape",
        "observability.metrics:FleetCollector._runs",
        ".order_by(goes_on.desc(), r.created_at.desc(), r.run_id)",
        ".order_by(r.last_seen_at.desc())",
        f"{PAGE}::test_what_is_left_out_stays_left_out_whichever_run_was_heard_of_last",
    ),
    Bug(
        "a run that has ended takes no room of one that goes on",
        "observability.metrics:FleetCollector._runs",
        "goes_on.desc(), ",
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
    Bug(
        "tile maps that were dropped are no records",
        "run_metrics:agents",
        'what = "maps" if name.startswith("dropped_maps_") else "records"',
        'what = "records"',
        "tests/collector/test_metrics.py::test_every_name_of_the_contract_is_there",
    ),
    Bug(
        "what a session cost that is over is no cost",
        "run_metrics:agents",
        " and (run_id, session) in go_on",
        "",
        "tests/collector/test_metrics.py::test_what_agents_cost_is_that_of_sessions_that_go_on",
    ),
    Bug(
        "a run that was killed is over after an hour",
        "observability.metrics:FleetCollector._runs",
        " and row.last_seen_at > self._clock() - OVER_AFTER_S",
        "",
        f"{PAGE}::test_a_run_is_over_once_it_has_ended_or_was_silent_for_an_hour",
    ),
    Bug(
        "levels of a run that is over alarm nobody",
        "dashboards/prometheus/fp8watch.rules.yml",
        """fp8watch_tile_sqnr_db{format="E2M1"} < 14) and on (run) fp8watch_run_running == 1""",
        """fp8watch_tile_sqnr_db{format="E2M1"} < 14)""",
        f"{D}/test_rules.py::test_promtool_is_content[what1]",
    ),
    Bug(
        "what has no module is not held back by what has none",
        "dashboards/prometheus/alertmanager.yml",
        """target_matchers: ['severity="warning"', 'module=~".+"']""",
        """target_matchers: ['severity="warning"']""",
        f"{D}/test_rules.py::test_a_critical_alert_holds_back_the_warnings_of_its_module_alone",
    ),
    Bug(
        "noise of four bits is judged as such",
        "dashboards/prometheus/fp8watch.rules.yml",
        """{format!~"E5M2|E2M1"} < 28""",
        """{format!~"E5M2"} < 28""",
        f"{D}/test_rules.py::test_promtool_is_content[what1]",
    ),
    Bug(
        "a level of noise says its format",
        "site_metrics:sites",
        "(name, row.format) if name in OF_FORMAT else (name,)",
        "(name, '') if name in OF_FORMAT else (name,)",
        "tests/collector/test_metrics.py::test_every_name_of_the_contract_is_there",
    ),
    Bug(
        "the page gives Prometheus its whole token",
        "docs/grafana.md",
        "--scopes read > secrets",
        "--scopes read | grep -o 'fp8w_[0-9a-f]*' > secrets",
        f"{D}/test_grafana_page.py::test_the_token_that_the_page_gives_prometheus_is_whole",
    ),
    Bug(
        "a loss that many ranks log now and then stays",
        "run_metrics:NewestScalars._newest_step",
        "if step is None and known is not None and known >= first:",
        "if False:",
        "tests/collector/test_metrics.py::test_a_loss_that_many_ranks_log_now_and_then_stays",
    ),
    Bug(
        "a loss between two looks is found however many ranks there are",
        "run_metrics:NewestScalars._newest_step",
        "if step is None and looked is not None:",
        "if False:",
        "tests/collector/test_metrics.py::test_a_loss_that_many_ranks_log_now_and_then_stays",
    ),
]
