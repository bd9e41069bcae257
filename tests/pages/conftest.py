"""One real collector with four runs, for all tests of the pages that only read."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from pages import synthetic
from pages.collector import make_app, serving


@pytest.fixture(scope="session")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of a collector that holds a faulty, a non-finite, a hostile and an empty run."""
    app = make_app(tmp_path_factory.mktemp("pages"))
    with serving(app) as client:
        synthetic.faulty_run(client, app.state.engine)
        synthetic.nonfinite_run(client)
        synthetic.hostile_run(client, app.state.engine)
        synthetic.empty_run(client)
        yield client
