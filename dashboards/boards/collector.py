"""Collector: whether what watches is well, out of Prometheus alone."""

from __future__ import annotations

from typing import Any

from .frame import board, query_variable
from .kit import PROMETHEUS, number, over_time, promql

UID = "fp8watch-collector"
OF = '{instance=~"$instance"}'


def _rate(metric: str) -> str:
    return f"rate({metric}{OF}[$__rate_interval])"


def _commit(quantile: float) -> str:
    return f"histogram_quantile({quantile}, sum by (le) ({_rate('fp8watch_collector_commit_seconds_bucket')}))"


def dashboard() -> dict[str, Any]:
    """The dashboard."""
    panels = [
        number(
            "Collectors that answer",
            "Targets of Prometheus that expose fp8watch's metrics.",
            promql(f"count(fp8watch_collector_inflight_bytes{OF})", instant=True),
            width=6,
        ),
        number(
            "Runs",
            "Heard of within a day.",
            promql("count(count by (run) (fp8watch_run_info))", instant=True),
            width=6,
        ),
        number(
            "Series of a scrape",
            "At most 10,000 and what the collector says of itself.",
            promql(
                f"max(scrape_samples_scraped{OF} and on (instance, job) fp8watch_collector_inflight_bytes)",
                instant=True,
            ),
            bad=10_000,
            width=6,
        ),
        number(
            "Series left out",
            "Above the budget, over all answers of the last hour: a series that is always left out counts at each of them.",
            promql(f"sum(increase(fp8watch_series_dropped_total{OF}[1h]))", instant=True),
            bad=1,
            width=6,
        ),
        over_time(
            "Bodies per second",
            "By what became of them. Agents give up what is refused; what is not accepted otherwise they keep, and send again.",
            [promql(f"sum by (outcome) ({_rate('fp8watch_collector_ingest_batches_total')})", "{{outcome}}")],
            unit="reqps",
        ),
        over_time(
            "Bytes per second",
            "Of bodies that were accepted, as they came.",
            [promql(f"sum({_rate('fp8watch_collector_ingest_bytes_total')})", "bytes")],
            unit="Bps",
        ),
        over_time(
            "Time to commit",
            "A batch is answered after its commit.",
            [promql(_commit(0.5), "half", "A"), promql(_commit(0.99), "99 of 100", "B")],
            unit="s",
        ),
        over_time(
            "Bodies in memory",
            "Past 128 MiB agents are told to wait.",
            [promql(f"fp8watch_collector_inflight_bytes{OF}", "{{instance}}")],
            unit="bytes",
        ),
        over_time(
            "Messages per second",
            "By channel and outcome; a dead one was given up.",
            [
                promql(
                    f"max by (channel, outcome) ({_rate('fp8watch_notifications_total')})",
                    "{{channel}} {{outcome}}",
                )
            ],
            unit="short",
        ),
        over_time(
            "Records that agents gave up",
            "All runs that were heard of within a day, since they began, by reason.",
            [
                promql(
                    f"sum by (reason) (max by (run, reason) (fp8watch_agent_dropped_records_total{OF}))",
                    "{{reason}}",
                )
            ],
            unit="short",
        ),
        over_time(
            "Time of a scrape",
            "The text is made at most every 5 s; the rest are answered out of memory.",
            [
                promql(
                    f"scrape_duration_seconds{OF} and on (instance, job) fp8watch_collector_inflight_bytes",
                    "{{instance}}",
                )
            ],
            unit="s",
            width=24,
        ),
    ]
    instances = query_variable(
        "instance",
        "Collector",
        "label_values(fp8watch_collector_inflight_bytes, instance)",
        source=PROMETHEUS,
        many=True,
    )
    return board(
        UID,
        "fp8watch · Collector",
        "The collector itself: what it takes, how long that takes, what it had to refuse.",
        [instances.all_value(".*")],
        panels,
        annotated=None,
    )
