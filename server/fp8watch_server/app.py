"""The collector as one FastAPI application.

Shapes:     Settings -> FastAPI
Thread:     event loop; the detect worker, the compactor and the notify dispatcher have threads of their own

`create_app` opens the database and brings it to the revision of this collector. The threads start with the
application's lifespan, so that what is only looked at (tests, OpenAPI) starts none.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio._backends._asyncio  # noqa: F401  what is imported by the first request fails where no file can be opened
import numpy.ma  # noqa: F401  of np.unique
from anyio import to_thread
from fastapi import FastAPI, Request
from sqlalchemy.engine import Engine
from starlette.responses import Response

from fp8watch_server.api import (
    bisection,
    comparison,
    delivery_log,
    fix_files,
    flight,
    incident_actions,
    readiness,
    run_actions,
    two_runs,
)
from fp8watch_server.api import routes as api
from fp8watch_server.auth.quota import Quotas
from fp8watch_server.auth.tokens import Auth, Tokens, check_exposure, install_token
from fp8watch_server.db import migrations
from fp8watch_server.db.collector_info import PUBLIC_URL, publish
from fp8watch_server.db.dialect import make_engine
from fp8watch_server.db.directory import open_directory
from fp8watch_server.db.pools import close
from fp8watch_server.db.shards import open_shards
from fp8watch_server.http import errors
from fp8watch_server.http.db_timeout import DbTimeoutMiddleware
from fp8watch_server.http.logs import RequestLog
from fp8watch_server.http.plain_address import PlainAddress
from fp8watch_server.incidents.silences import copy_silences
from fp8watch_server.ingest import routes as ingest
from fp8watch_server.ingest.fast_path import IngestFastPath
from fp8watch_server.ingest.ingest_stats import IngestStats
from fp8watch_server.ingest.usage import UsageCounter
from fp8watch_server.observability import metrics
from fp8watch_server.observability.otlp_metrics import exporting
from fp8watch_server.pipeline.detect_worker import Detection
from fp8watch_server.settings import Settings
from fp8watch_server.settings.quotas import parse_quotas
from fp8watch_server.station import Dispatching, Station
from fp8watch_server.store.fields import FieldError
from fp8watch_server.store.queries import CursorError

__all__ = ["Dispatching", "create_app"]


def _detection(settings: Settings) -> Detection:
    from fp8watch_server.detect.engine import DetectionEngine as DetectEngine
    from fp8watch_server.detect.finding import facts_of
    from fp8watch_server.detect.rules import Rules, load_rules
    from fp8watch_server.detect.sessions import sessions_of
    from fp8watch_server.incidents.fold import close_quiet, fold
    from fp8watch_server.incidents.messages import write_resolved

    rules = load_rules(Path(settings.rules)) if settings.rules else Rules()

    def make_engine(facts: Mapping[int, Any], run_id: str, run_name: str) -> DetectEngine:
        return DetectEngine(facts, rules.thresholds_for(run_id, run_name))

    def load_engine(saved: bytes, facts: Mapping[int, Any], run_id: str, run_name: str) -> DetectEngine:
        return DetectEngine.load(saved, facts, rules.thresholds_for(run_id, run_name))

    return Detection(
        make_facts=facts_of,
        make_engine=make_engine,
        fold=fold,
        close_quiet=close_quiet,
        queue_resolved=write_resolved,
        make_sessions=sessions_of,
        load_engine=load_engine,
    )


def _dispatcher(engine: Engine, settings: Settings) -> Dispatching:
    from fp8watch_server.notify.service import Sending

    made: Dispatching = Sending(engine, settings)
    return made


def _install_pages(app: FastAPI) -> None:
    from fp8watch_server.pages.routes import install

    install(app)


def create_app(
    settings: Settings,
    *,
    detection: Detection | None = None,
    dispatcher: Callable[[Engine, Settings], Dispatching | None] = _dispatcher,
    pages: bool = True,
) -> FastAPI:
    """The collector.

    Args:
        settings: where the database is, who may come in, where messages go.
        detection: detectors and incidents; None: the real ones.
        dispatcher: makes the sender of messages.
        pages: whether to serve HTML.

    Raises:
        DatabaseUrlError, UnknownRevision, Exposed, ShardMixedUp: each says what to do.
        sqlalchemy.exc.OperationalError: the database cannot be opened.
    """
    engine = make_engine(settings.database_url)
    migrations.upgrade(engine)
    shards = open_shards(engine, settings.shard_urls, open_directory(engine, settings.shard_urls))
    publish(engine, PUBLIC_URL, settings.public_url.rstrip("/"))
    install_token(engine, settings)
    check_exposure(engine, settings)
    detection, stats = detection or _detection(settings), IngestStats()
    page = metrics.MetricsPage(shards, stats)
    exporter = exporting(settings, page.families)
    home = Station(engine, settings, detection, dispatcher, stats)
    stations = {
        name: Station(shard.engine, settings, detection, dispatcher, stats, name)
        for name, shard in shards.others.items()
    }

    def on_change() -> None:
        for station in (home, *stations.values()):
            station.wake_sender()

    def there(shard: Engine, station: Station) -> None:
        publish(shard, PUBLIC_URL, settings.public_url.rstrip("/"))
        copy_silences(engine, shard, time.time())
        station.start()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        home.start()
        for name, shard in shards.others.items():
            shard.on_answer = partial(there, shard.engine, stations[name])
            shard.start()
        if shards.others:
            shards.directory.start()
        if settings.quotas:
            usage.start()
        if exporter is not None:
            exporter.start()
        try:
            yield
        finally:
            if exporter is not None:
                await to_thread.run_sync(exporter.stop)
            await to_thread.run_sync(usage.stop)
            await to_thread.run_sync(shards.directory.stop)
            for shard in shards.others.values():
                await to_thread.run_sync(shard.stop)
            for station in (home, *stations.values()):
                await to_thread.run_sync(station.stop)
            for database in (engine, *(shard.engine for shard in shards.others.values())):
                await to_thread.run_sync(close, database)

    app = FastAPI(title="fp8watch collector", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.engine = engine
    app.state.shards = shards
    app.state.settings = settings
    app.state.quotas = quotas = Quotas(parse_quotas(settings.quotas))
    usage = UsageCounter(shards, quotas)
    app.state.usage = usage
    app.state.detection = detection
    app.state.worker = home.worker
    app.state.on_change = on_change
    app.state.ingest = home.ingest
    app.state.stations = stations
    app.state.ingests = {name: station.ingest for name, station in stations.items()}
    app.state.metrics = page
    errors.install(app)
    app.add_exception_handler(FieldError, _on_asked_wrongly)
    app.add_exception_handler(CursorError, _on_asked_wrongly)
    app.include_router(ingest.router)
    app.include_router(incident_actions.router)
    app.include_router(run_actions.router)
    app.include_router(comparison.router)
    app.include_router(bisection.router)
    app.include_router(flight.router)
    app.include_router(fix_files.router)
    app.include_router(delivery_log.router)
    app.include_router(two_runs.router)
    app.include_router(api.router)
    app.include_router(readiness.router)
    app.add_api_route("/metrics", _metrics, methods=["GET"], tags=["operations"])
    app.add_middleware(IngestFastPath)
    app.add_middleware(PlainAddress)
    app.add_middleware(DbTimeoutMiddleware, shards=shards)
    app.add_middleware(Auth, tokens=Tokens(engine), settings=settings)
    app.add_middleware(RequestLog)
    if pages:
        _install_pages(app)  # last, and so outermost: refusals carry the security headers too
    return app


def _metrics(request: Request) -> Response:
    """For Prometheus."""
    page = request.app.state.metrics
    return Response(page.text(), media_type=page.content_type)


def _on_asked_wrongly(request: Request, e: Exception) -> Response:
    value: dict[str, Any] = {"rule": "the value is one that the collector knows", "remedy": "choose one that is named"}
    return errors.Problem(422, str(e), **value).response()
