"""Requests made out of the OpenAPI description: whatever they are, the answer is below 500 and is JSON or a problem."""

from __future__ import annotations

from collections import Counter
from typing import Any

import hypothesis
import pytest
import schemathesis
from collector.kit import Agent, make_site, on_sqlite
from hypothesis import HealthCheck, Phase
from schemathesis.checks import not_a_server_error

ALLOWED, FORBIDDEN = schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE
CASES = [
    pytest.param(ALLOWED, 3, id="allowed"),
    pytest.param(ALLOWED, 12, id="allowed-many", marks=pytest.mark.long),
    pytest.param(
        FORBIDDEN, 6, id="forbidden", marks=pytest.mark.heavy(13, "server/fp8watch_server/api")
    ),  # much is thrown away on the way
]


@on_sqlite
@pytest.mark.parametrize(("mode", "num_examples"), CASES)
def test_whatever_the_description_allows_and_forbids_is_answered(
    client: Any, app: Any, mode: Any, num_examples: int
) -> None:
    site = make_site()
    Agent(client, run="0").register([site]).send([site], [1, 2])
    app.state.worker.drain()
    schema = schemathesis.openapi.from_dict(app.openapi())
    counted: Counter[int] = Counter()
    operations = [found.ok() for found in schema.get_all_operations()]

    def check(operation: Any) -> None:
        @hypothesis.settings(
            max_examples=num_examples,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
        def ask(case: Any) -> None:
            answer = case.call(base_url=str(client.base_url))
            counted[answer.status_code] += 1
            case.validate_response(answer, checks=[not_a_server_error])
            kind = answer.headers.get("content-type", [""])[0]
            assert answer.status_code == 204 or kind.startswith(("application/", "text/")), kind
            if answer.status_code >= 400:
                assert kind == "application/problem+json", (answer.status_code, kind)

        ask()

    num_asked = 0
    for operation in operations:
        try:
            check(operation)
            num_asked += 1
        except hypothesis.errors.Unsatisfiable:  # it takes nothing that could be wrong
            assert mode is FORBIDDEN
    print(f"{len(operations)} operations, {sum(counted.values())} requests: {dict(counted)}")
    assert len(operations) >= 25
    assert num_asked >= 8
    assert sum(counted.values()) >= 2 * num_asked
