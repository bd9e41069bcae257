"""Uploader: delivers one parcel, registers what the collector does not know, and splits what it finds too large.

Upstream:   fp8watch_agent.sender
Downstream: fp8watch_agent.transport
Thread:     sender

No waiting and no retries here: those belong to the caller, who owns the clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from fp8watch_agent.batch import Kind, Parcel, rekeyed, split
from fp8watch_agent.health import DROP_UNREGISTERED
from fp8watch_agent.record import Site
from fp8watch_agent.session import Registration, Session
from fp8watch_agent.transport import Ack, Answer, ResponseMeaning, Transport, judge, read_ack
from fp8watch_agent.wire import BATCH_CONTENT_TYPE, TILE_MAPS_CONTENT_TYPE

SITES_PER_REQUEST = 250
MAX_REGISTRATIONS = 3  # per parcel; more registrations would not help

_PATHS = {
    Kind.BATCH: ("/v1/batches", BATCH_CONTENT_TYPE),
    Kind.MAPS: ("/v1/tile-maps", TILE_MAPS_CONTENT_TYPE),
}


@dataclass
class Receipt:
    """Outcome of a parcel. ACKNOWLEDGED: all of it is accounted for, as acknowledged or as refused."""

    verdict: ResponseMeaning
    answer: Answer
    acknowledged: int = 0
    refused: dict[str, int] = field(default_factory=dict)  # by reason
    refused_bodies: list[tuple[Parcel, str]] = field(default_factory=list)
    captures: dict[int, tuple[int, int]] | None = None  # site -> steps of wanted tile maps; None: no answer about it
    num_bytes: int = 0
    num_rekeyed: int = 0  # bodies that went under another key, because somebody else's had theirs

    def refuse(self, parcel: Parcel, reason: str) -> None:
        self.refused[reason] = self.refused.get(reason, 0) + parcel.amount
        self.refused_bodies.append((parcel, reason))

    def merge(self, other: Receipt) -> None:
        self.acknowledged += other.acknowledged
        self.num_bytes += other.num_bytes
        self.num_rekeyed += other.num_rekeyed
        self.refused_bodies += other.refused_bodies
        for reason, n in other.refused.items():
            self.refused[reason] = self.refused.get(reason, 0) + n
        if other.captures is not None:
            self.captures = other.captures


@dataclass
class Told:
    """What a database has been told. Several threads may share it: at worst the same is said twice."""

    known: dict[str, int] = field(default_factory=dict)  # session -> number of registrations that it has
    versions: dict[str, int] = field(default_factory=dict)  # session -> version of its facts that it has
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)  # run -> its facts that it has
    sites: dict[str, dict[int, Site]] = field(default_factory=dict)  # run -> its sites that it has
    halved: set[tuple[str, int]] = field(default_factory=set)  # (session, seq) of bodies that were found too large


class Uploader:
    """Connection to one collector at a time, for any number of sessions.

    What a session says of its run and of sites is not said again by another session of the run: the ranks of a host say the same.

    Args:
        transport: may be replaced by one to another collector of the same database.
        told: by others to the same database.
    """

    def __init__(self, transport: Transport, told: Told | None = None) -> None:
        self.transport = transport
        self._told = Told() if told is None else told
        self._refused: Answer | None = None  # to a part of the last registration, where one was

    def register(self, registration: Registration) -> Answer | None:
        """Register run, session and new sites. None on success, else the failed response."""
        version, session = registration.version, registration.session
        self._refused = None
        run = f"/v1/runs/{quote(session.run_id, safe='')}"
        of_session = f"{run}/sessions/{quote(session.session, safe='')}"
        start = self._told.known.get(session.session, -1)
        if start < 0:
            facts = session.run_facts()
            if self._told.runs.get(session.run_id) != facts:
                failed = self._put(run, facts, session.key)
                if failed is not None:
                    return failed
                self._told.runs[session.run_id] = facts
            failed = self._put(of_session, session.session_facts(), session.key)
            if failed is not None:
                return failed
            start = self._told.known[session.session] = 0
            self._told.versions[session.session] = version
        elif self._told.versions.get(session.session, version) != version:
            failed = self._put(of_session, session.session_facts(), session.key)
            if failed is not None:
                return failed
            self._told.versions[session.session] = version
        count = len(registration)
        told = self._told.sites.setdefault(session.run_id, {})
        sites = [s for s in registration.sites(start) if told.get(s.id) != s] if count > start else []
        for at in range(0, len(sites), SITES_PER_REQUEST):
            part = sites[at : at + SITES_PER_REQUEST]
            value: dict[str, object] = {"session": session.session, "sites": part}
            failed = self._put(f"{run}/sites", value, session.key)
            if failed is not None:
                return failed
            told.update({site.id: site for site in part})
        self._told.known[session.session] = count
        return None

    def forget(self, session: Session) -> None:
        """The collector does not know something of this session: the next registration says everything."""
        self._told.known.pop(session.session, None)
        self._told.runs.pop(session.run_id, None)
        self._told.sites.pop(session.run_id, None)

    def _put(self, path: str, value: object, key: str) -> Answer | None:
        answer = self.transport.put(path, value, key)
        verdict = judge(answer)
        self._refused = answer if verdict in (ResponseMeaning.REFUSED, ResponseMeaning.SPLIT) else self._refused
        if self._refused is answer:
            return None  # batches will show whether it matters
        return None if verdict is ResponseMeaning.ACKNOWLEDGED else answer

    def send(self, parcel: Parcel, registration: Registration, *, rekey: bool = True) -> Receipt:
        """Deliver a parcel and the registrations it needs. Never raises for what the collector answers.

        Args:
            rekey: whether it goes under another key where somebody else's body has its own.
        """
        if (registration.session.session, parcel.seq) in self._told.halved:
            halves = split(parcel)
            if halves is not None:  # one half may be stored already: the whole would store it again under another key
                return self._send_halves(parcel, halves, registration, Answer(413))
        answer = Answer(0, error="not sent")
        path, content_type = _PATHS[parcel.kind]
        for _ in range(MAX_REGISTRATIONS):
            failed = self.register(registration)
            if failed is not None:
                verdict = judge(failed)
                if verdict is not ResponseMeaning.REGISTER:
                    return Receipt(verdict, failed)
                answer = failed
            else:
                answer = self.transport.post(path, parcel.body, content_type, registration.session.key)
            verdict = judge(answer)
            if verdict is ResponseMeaning.REFUSED and answer.status == 409 and rekey:
                again = rekeyed(parcel)
                if again is not None:
                    receipt = self.send(again, registration, rekey=False)
                    receipt.num_rekeyed += receipt.verdict is ResponseMeaning.ACKNOWLEDGED and not receipt.refused
                    return receipt
            if verdict is not ResponseMeaning.REGISTER:
                return self._receipt(parcel, registration, answer, verdict)
            self.forget(registration.session)
        receipt = Receipt(ResponseMeaning.ACKNOWLEDGED, self._refused or answer)  # why, where it is known
        receipt.refuse(parcel, DROP_UNREGISTERED)
        return receipt

    def _receipt(self, parcel: Parcel, registration: Registration, answer: Answer, verdict: ResponseMeaning) -> Receipt:
        if verdict is ResponseMeaning.ACKNOWLEDGED:
            ack = read_ack(answer, parcel.seq)
            if ack is None:
                return Receipt(ResponseMeaning.RETRY, Answer(0, error=f"no acknowledgement of {parcel.seq}: {answer}"))
            return Receipt(verdict, answer, parcel.amount, captures=_captures(ack), num_bytes=len(parcel.body))
        if parcel.kind == Kind.MAPS and answer.status in (404, 405):
            verdict = ResponseMeaning.REFUSED  # a collector that refuses tile maps still accepts batches
        if verdict is ResponseMeaning.SPLIT:
            halves = split(parcel)
            if halves is not None:
                self._told.halved.add((registration.session.session, parcel.seq))
                return self._send_halves(parcel, halves, registration, answer)
            verdict = ResponseMeaning.REFUSED
        if verdict is ResponseMeaning.REFUSED:
            receipt = Receipt(ResponseMeaning.ACKNOWLEDGED, answer)
            receipt.refuse(parcel, f"http_{answer.status}")
            return receipt
        return Receipt(verdict, answer)

    def _send_halves(
        self, parcel: Parcel, halves: tuple[Parcel, Parcel], registration: Registration, answer: Answer
    ) -> Receipt:
        whole = Receipt(ResponseMeaning.ACKNOWLEDGED, answer)
        for half in halves:
            receipt = self.send(half, registration)
            if receipt.verdict is not ResponseMeaning.ACKNOWLEDGED:
                return receipt  # the parent is retried as a whole, and splits into the same halves
            whole.merge(receipt)
            whole.answer = receipt.answer
        self._told.halved.discard((registration.session.session, parcel.seq))
        return whole


def _captures(ack: Ack) -> dict[int, tuple[int, int]] | None:
    return None if ack.captures is None else {c.site: c.steps for c in ack.captures}
