"""What a collector refuses of what a watch hands to its agent, without a collector: stand-ins of a recorder ask here.

Shapes:     a session, sites, steps and tile maps as the Recorder takes them -> AssertionError, or msgspec's and the wire's own errors
Thread:     the test's
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import msgspec
import numpy as np

from fp8watch_agent.batch import maps_parcel
from fp8watch_agent.expert_vectors import pack, unpack
from fp8watch_agent.record import Site, TileMap
from fp8watch_agent.session import Registration, Session
from fp8watch_agent.wire import Batch, Header, decode_batch, decode_tile_maps, encode_batch
from fp8watch_server.ingest.registration import RunBody, SessionBody, SitesBody, decode

P = ParamSpec("P")
T = TypeVar("T")
REFUSALS: list[str] = []
"""Of all sessions of this process, not read yet: a watch swallows what its recorder raises."""


def told(method: Callable[P, T]) -> Callable[P, T]:
    """Keeps what a method raises in REFUSALS."""

    @functools.wraps(method)
    def asked(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(*args, **kwargs)
        except Exception as e:
            REFUSALS.append(f"{method.__name__}: {e}")
            raise

    return asked


def refusals() -> list[str]:
    """What was refused since this was asked last."""
    found = REFUSALS[:]
    REFUSALS.clear()
    return found


class CollectorChecks:
    """One session, as a collector meets it."""

    @told
    def __init__(self, session: Session) -> None:
        self.registration = Registration(session)
        self.known: set[int] = set()
        self.num_steps = 0
        decode(msgspec.json.encode(session.run_facts()), RunBody)
        self.facts({})

    @told
    def facts(self, facts: Mapping[str, str | int | float | bool]) -> None:
        """Facts that become known while training runs."""
        self.registration.update_facts(facts)
        decode(msgspec.json.encode(self.registration.session.session_facts()), SessionBody)

    @told
    def sites(self, sites: Sequence[Site]) -> None:
        """A registration of sites, refused as a whole for one wrong value."""
        fresh = self.registration.add(sites)
        decode(msgspec.json.encode({"session": self.registration.session.session, "sites": fresh}), SitesBody)
        self.known |= {site.id for site in fresh}

    @told
    def step(
        self,
        step: Any,
        site_ids: Any,
        rows: Any,
        logs: Mapping[str, float] | None = None,
        batch_id: str | None = None,
        experts: Mapping[int, Any] | None = None,
    ) -> Batch:
        """A step in a body of its own; returned is what a collector reads."""
        self._are_known([*(int(i) for i in site_ids), *(experts or {})])
        assert len({int(i) for i in site_ids}) == len(rows), "one row a site"
        session, at = self.registration.session, int(step["step"])
        self.num_steps += 1
        header = Header(
            session.run_id,
            session.session,
            session.rank,
            self.num_steps,
            at,
            1,
            len(rows),
            logs={str(name): [float(value)] for name, value in (logs or {}).items()},
            batch_ids=[] if batch_id is None else [str(batch_id)],
        )
        vectors = unpack(pack(experts), at) if experts else []
        steps, of_rows = np.array([step]), np.full(len(rows), at)
        return decode_batch(encode_batch(header, steps, of_rows, site_ids, rows.copy(), experts=vectors))

    @told
    def maps(self, maps: Sequence[TileMap]) -> None:
        """Tile maps in one body."""
        self._are_known(each.site for each in maps)
        decode_tile_maps(maps_parcel(self.registration.session, 0, list(maps)).body)

    def _are_known(self, site_ids: Iterable[int]) -> None:
        unknown = sorted({int(i) for i in site_ids} - self.known)
        assert not unknown, f"{len(unknown)} sites are not registered: a collector refuses the whole body"
