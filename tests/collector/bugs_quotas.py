"""What is broken on purpose in quotas of tenants, and the test that sees it."""

from __future__ import annotations

from support.planted import Bug

Q = "tests/collector/test_quotas.py"
REFUSED = f"{Q}::test_what_is_too_much_is_refused_and_agents_keep_it"
KEPT = f"{Q}::test_runs_and_bytes_are_those_that_the_tokens_name"

OUTCOMES = "tests/collector/test_outcomes.py"

QUOTAS = [
    Bug(
        "what is decoded is charged to its tenant",
        "group_commit:Committer._open",
        "            waiting.sender.charge(waiting.sender.grant, batch.header.num_records)\n",
        "",
        REFUSED,
    ),
    Bug(
        "a tenant in debt does not come in by a relay",
        "ingest.joined:post_joined",
        "    quotas_of(request).admit(sender.grant)\n",
        "",
        REFUSED,
    ),
    Bug(
        "each tenant has an account of its own",
        "auth.quota:Quotas._bucket",
        "self._buckets.setdefault(tenant,",
        'self._buckets.setdefault("",',
        f"{Q}::test_a_tenant_in_debt_waits_until_it_is_paid_and_nobody_else_does",
    ),
    Bug(
        "what a tenant has not sent is not saved up for long",
        "auth.quota:Quotas._bucket",
        "min(full, bucket.records",
        "max(0.0, bucket.records",
        f"{Q}::test_a_tenant_in_debt_waits_until_it_is_paid_and_nobody_else_does",
    ),
    Bug(
        "a run that is there may be registered again",
        "auth.quota:Quotas.admit_run",
        "or run_id in usage.runs",
        "",
        KEPT,
    ),
    Bug(
        "bytes of a tenant are those of its runs",
        "ingest.usage:usage_of",
        "sum(runs[run] for run in mine)",
        "0",
        KEPT,
    ),
    Bug(
        "what agents hold is not counted as refused",
        "ingest.ingest_stats",
        '403: "forbidden"',
        '403: "refused"',
        f"{OUTCOMES}::test_each_is_named_by_what_agents_do",
    ),
    Bug(
        "what passes a tenant's limit is counted as that",
        "ingest_stats:outcome_of",
        'startswith("quota-")',
        'startswith("quota+")',
        f"{OUTCOMES}::test_what_a_tenant_may_not_send_is_neither_lost_nor_the_database_s_fault",
    ),
    Bug(
        "a body that ends early is not counted as refused",
        "ingest_stats:outcome_of",
        "isinstance(e.__cause__, ClientDisconnect)",
        "isinstance(e, ClientDisconnect)",
        f"{OUTCOMES}::test_a_body_whose_sender_has_gone_is_none_that_was_refused",
    ),
    Bug(
        "the alert on refusals knows those that agents hold",
        "dashboards/prometheus/fp8watch.rules.yml",
        "refused|conflict|forbidden|overload",
        "refused|conflict|overload",
        f"{OUTCOMES}::test_the_docs_name_all_of_them",
    ),
]
