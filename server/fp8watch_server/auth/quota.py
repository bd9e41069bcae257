"""Quotas of tenants: what the tokens of one may bring in, so that it delays nobody else.

Shapes:     a grant -> let in, or a Problem that says when to come back
Thread:     event loop asks; committers charge; a thread of the collector counts runs and bytes

A tenant is the label of its tokens (`fp8watch token create --tenant`). Records are charged when a batch is decoded, and a tenant
that is in debt is refused before its body is read: what it sends too much costs the collector a header. Runs and bytes
are those of the runs that its tokens name.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fp8watch_server.auth.grant import Grant
from fp8watch_server.http.errors import Problem
from fp8watch_server.settings.quotas import Quota

MAX_RETRY_S = 30
BURST_S = 2.0
"""Seconds of its rate that a tenant may save up: what a relay or a spool brings at once."""


@dataclass
class _Bucket:
    """What a tenant may still bring in; below 0 it is in debt."""

    records: float
    at: float


@dataclass(frozen=True)
class Usage:
    """What the runs of a tenant take."""

    runs: frozenset[str] = frozenset()
    num_bytes: int = 0


class Quotas:
    """One per collector.

    Args:
        limits: tenant -> quota; "*": of each tenant that is not named.
        clock: seconds, ascending.
    """

    def __init__(self, limits: Mapping[str, Quota], clock: Callable[[], float] = time.monotonic) -> None:
        self._limits, self._clock = limits, clock
        self._lock = threading.Lock()
        self._buckets: dict[str, _Bucket] = {}
        self.usage: Mapping[str, Usage] = {}
        self.refused: dict[tuple[str, str], int] = {}

    def of(self, tenant: str) -> Quota | None:
        """The quota of a tenant; None: it has none."""
        return self._limits.get(tenant) or self._limits.get("*")

    def admit(self, grant: Grant) -> None:
        """Let a body in before it is read.

        Raises:
            Problem: 429, the tenant's records of these seconds are used up; 507, its bytes are.
        """
        quota = self.of(grant.tenant)
        if quota is None:
            return
        usage = self.usage.get(grant.tenant)
        if quota.num_bytes and usage is not None and usage.num_bytes >= quota.num_bytes:
            raise self._refusal(
                507,
                grant.tenant,
                "bytes",
                f"the runs of tenant {grant.tenant!r} take {usage.num_bytes} bytes",
                f"at most {quota.num_bytes} bytes are stored for it",
                MAX_RETRY_S,
            )
        if quota.records_s:
            with self._lock:
                owed = -self._bucket(grant.tenant, quota).records
            if owed >= 0:
                raise self._refusal(
                    429,
                    grant.tenant,
                    "records",
                    f"tenant {grant.tenant!r} has sent its records of these seconds",
                    f"at most {quota.records_s:g} records a second",
                    min(MAX_RETRY_S, 1 + int(owed / quota.records_s)),
                )

    def admit_run(self, grant: Grant, run_id: str) -> None:
        """Let a run be registered.

        Raises:
            Problem: 507, the tenant has its number of runs.
        """
        quota, usage = self.of(grant.tenant), self.usage.get(grant.tenant)
        if quota is None or not quota.runs or usage is None or run_id in usage.runs or len(usage.runs) < quota.runs:
            return
        raise self._refusal(
            507,
            grant.tenant,
            "runs",
            f"tenant {grant.tenant!r} has {len(usage.runs)} runs",
            f"at most {quota.runs} runs are kept for it",
            MAX_RETRY_S,
        )

    def charge(self, grant: Grant, num_records: int) -> None:
        """Count what was decoded."""
        quota = self.of(grant.tenant)
        if quota is not None and quota.records_s:
            with self._lock:
                self._bucket(grant.tenant, quota).records -= num_records

    def _bucket(self, tenant: str, quota: Quota) -> _Bucket:
        now, full = self._clock(), quota.records_s * BURST_S
        bucket = self._buckets.setdefault(tenant, _Bucket(full, now))
        bucket.records = min(full, bucket.records + (now - bucket.at) * quota.records_s)
        bucket.at = now
        return bucket

    def _refusal(self, status: int, tenant: str, what: str, detail: str, rule: str, retry_s: int) -> Problem:
        with self._lock:
            self.refused[tenant, what] = self.refused.get((tenant, what), 0) + 1
        return Problem(
            status,
            detail,
            rule=rule,
            remedy="agents keep the batch and send it again; ask for more, or send less: FP8WATCH_EVERY, FP8WATCH_MERGE_STEPS"
            if what == "records"
            else "delete runs, keep less of them (fp8watch prune), or ask for more",
            headers={"Retry-After": str(retry_s)},
            error=f"quota-{what}",
        )
