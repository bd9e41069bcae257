"""Ranks that must agree: mode 15 by the hash of the weights, and mode 20 by their scales (`scale_agreement`).

Shapes:     columns [ranks, S] of one step -> at most one finding a mode
Thread:     detect worker

Compared is only what must be equal: hashes of weights between replicas (equal tp, pp and ep coordinates); sharded weights are
different tensors. Where the mesh was not declared, ranks that have agreed in most weights must go on agreeing; ranks that never did
are not compared.

Ranks are replicas because each gets the gradients of all. Those that never got one of each other's (`gradient_sketches`), and whose
weights nothing else keeps equal, are none, however they began: local SGD averages weights now and then. That is said once, as information; within a part that shares its gradients weights are compared as ever.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fp8watch_agent.record import Measured
from fp8watch_server.detect.cross_rank_step import CrossRankStep
from fp8watch_server.detect.families.gradient_sketches import GradientParts
from fp8watch_server.detect.families.scale_agreement import ScaleAgreement
from fp8watch_server.detect.families.sides import by_rank, minority, sides_of
from fp8watch_server.detect.finding import Evidence, Finding
from fp8watch_server.detect.sessions import SessionFacts
from fp8watch_server.detect.step_view import WEIGHT, Mask

Array = npt.NDArray[Any]
SHARDED = ("tp", "pp", "ep", "cp_weights")
"""Mesh axes along which weights are different tensors."""
MOST_AGREED, AGREED_TIMES = 8, 4
"""Weights that agreed between ranks which get no gradients of each other, and how many times as many as differed: more are kept equal by
something else than gradients."""
SURE_STEPS = 8
"""Steps in which those that were compared agreed, from which on they are known to be kept so: what differs later is wrong, however many do."""


class Agreement:
    """What the ranks of one attempt of a run must have in common."""

    def __init__(self) -> None:
        self._sessions: dict[int, SessionFacts] = {}
        self._agreed_at: Array = np.zeros(0, dtype=np.int64)  # step in which the replicas of a weight agreed last
        self._compared: dict[
            tuple[int, int], tuple[Array, Array]
        ] = {}  # pair -> weights that ever agreed, ever differed
        self._scales = ScaleAgreement()
        self._parts = GradientParts()
        self._num_agreed = self._num_differed = 0  # weights, between parts that are known
        self._num_steps_equal = 0  # in which all of them agreed that were compared
        self._kept_equal = False
        self._told_parts = False

    def session(self, facts: SessionFacts) -> None:
        """A rank's newest session."""
        known = self._sessions.get(facts.rank)
        if known is not None and known.session != facts.session:
            self._parts.forget()
            self._scales = ScaleAgreement()
            self._num_agreed = self._num_differed = self._num_steps_equal = 0
            self._kept_equal = self._told_parts = False
        self._sessions[facts.rank] = facts

    def observe(self, now: CrossRankStep) -> list[Finding]:
        """Compare the ranks of one step. A rank that is missing is compared with nobody."""
        if len(now.views) < 2:
            return []
        ranks = [v.rank for v in now.views]
        found = []
        self._parts.observe(now)
        corrupted = self._hashes(now, ranks)
        if corrupted is not None:
            found.append(corrupted)
        differ = self._scales.observe(now, ranks, self._sessions)
        if differ is not None:
            found.append(differ)
        return found

    # ---- weights

    def _hashes(self, now: CrossRankStep, ranks: list[int]) -> Finding | None:
        """Weights whose hashes differ between replicas. In one step there are those of a part of the weights only."""
        columns, has = by_rank(now, "weight_hash", Measured.HASH, np.int64)
        has &= now.table.role[None, :] == WEIGHT
        if np.count_nonzero(has.any(axis=1)) < 2:
            return None
        more = len(now) - len(self._agreed_at)
        if more > 0:
            self._agreed_at = np.concatenate([self._agreed_at, np.full(more, -1, dtype=np.int64)])
        found = apart = None
        for whole in self._replicas(ranks, columns, has):
            agreed = np.ones(len(now), dtype=np.bool_)
            groups = [[whole[k] for k in part] for part in self._parts.split([ranks[i] for i in whole])]
            if len(groups) > 1:
                both, differ = _differing(columns, has, whole)
                if len(groups) == len(whole):  # one rank each, which agrees with itself
                    agreed = both & ~differ
                if self._are_kept_equal(both, differ):
                    groups = [whole]
                elif differ.any() and not self._told_parts:
                    parts = sorted(sorted(ranks[i] for i in group) for group in groups)
                    apart = self._no_replicas(now, parts, both, differ)
            for group in groups:
                both, differ = _differing(columns, has, group)
                if differ.any() and found is None and not self._parts.waits():
                    found = self._corrupted(now, [ranks[i] for i in group], columns[np.array(group)], both, differ)
                agreed &= both & ~differ
            self._agreed_at[agreed] = now.step
        if found is None and apart is not None:
            self._told_parts = True
        return found or apart

    def _are_kept_equal(self, both: Mask, differ: Mask) -> bool:
        """Whether weights of ranks that get no gradients of each other agree all the same, and have to."""
        self._num_differed += int(np.count_nonzero(differ))
        self._num_agreed += int(np.count_nonzero(both & ~differ))
        most = self._num_agreed >= MOST_AGREED and self._num_agreed > AGREED_TIMES * self._num_differed
        self._num_steps_equal += bool(both.any() and not differ.any())
        self._kept_equal |= most and self._num_steps_equal >= SURE_STEPS
        return most or self._kept_equal

    def _no_replicas(self, now: CrossRankStep, parts: list[list[int]], both: Mask, differ: Mask) -> Finding:
        """Parts of the ranks get no gradients of each other, and their weights are not the same."""
        rows, num_ranks = now.in_flow(differ), sum(map(len, parts))
        looks = f"of its norm, {self._parts.num_looks} looked at"
        evidence = [
            Evidence("gradients_apart", float(f"{self._parts.apart:.3g}"), 0, looks, self._parts.first),
            Evidence("parts", len(parts), 1, f"of {num_ranks} ranks", now.step),
            Evidence("differing_weights", len(rows), 0, f"of {int(np.count_nonzero(both))} weights", now.step),
        ]
        return now.finding(
            "silent-data-corruption", "info", rows, evidence, "shared", rank=parts[1][0], kind="no-replicas", parts=len(parts),
            num_ranks=num_ranks, looks=self._parts.num_looks, since=self._parts.first, sampled="weight_hash",
        )  # fmt: skip

    def _corrupted(self, now: CrossRankStep, ranks: list[int], hashes: Array, both: Mask, differ: Mask) -> Finding:
        rows = now.in_flow(differ)
        row = int(rows[0])
        sides = sides_of(ranks, hashes[:, row])
        odd = sides.odd
        hosts = {self._sessions[r].host if r in self._sessions else "" for r in odd}
        host = hosts.pop() if len(hosts) == 1 else ""
        agreed = int(self._agreed_at[row])
        last_agreed = agreed if 0 <= agreed < now.step else None
        evidence = [
            Evidence("weight_hash", _hex(sides.value), _hex(sides.other), "", now.step),
            Evidence("differing_weights", len(rows), 0, f"of {int(np.count_nonzero(both))} weights", now.step),
            *minority(sides, f"of {len(ranks)} replicas", now.step),
            Evidence("last_agreed_step", last_agreed, None, "step", None),
        ]
        if host:
            evidence.append(Evidence("host", host, None, "", None))
        return now.finding(
            "silent-data-corruption",
            "critical",
            rows,
            evidence,
            "shared",
            rank=odd[0],
            by_hash=True,
            odd_ranks=odd[:64],
            tied=sides.tied,
            num_replicas=len(ranks),
            host=host,
            sampled="weight_hash",
            # It happened after the step in which they agreed last; the hash only says that it has.
            last_agreed=last_agreed,
            first_differed=now.step,
            began=now.step if last_agreed is None else last_agreed + 1,
            not_before=now.step if last_agreed is None else last_agreed + 1,
        )

    def _replicas(self, ranks: list[int], columns: Array, has: Array) -> list[list[int]]:
        """Groups of indices into `ranks` whose weights must be equal."""
        known = [r for r in ranks if self._sessions.get(r) is not None and self._sessions[r].mesh]
        if len(known) == len(ranks):
            groups: dict[tuple[int, ...], list[int]] = {}
            for i, rank in enumerate(ranks):
                mesh = self._sessions[rank].mesh
                groups.setdefault(tuple(mesh.get(a, 0) for a in SHARDED), []).append(i)
            return [g for g in groups.values() if len(g) > 1]
        return self._learned(ranks, columns, has)

    def _learned(self, ranks: list[int], columns: Array, has: Array) -> list[list[int]]:
        """Ranks that must agree because they have: in most of the weights that were compared, and in this one before.

        Shards of a tensor differ in nearly all weights, though some begin as equal zeros.
        """
        groups: list[list[int]] = []
        for i in range(len(ranks)):
            for group in groups:
                key = (ranks[group[0]], ranks[i])
                both = has[group[0]] & has[i]
                same = both & (columns[group[0]] == columns[i])
                now_same = np.flatnonzero(same)
                agreed, differed = self._compared.get(key, (np.zeros(0, dtype=np.bool_), np.zeros(0, dtype=np.bool_)))
                agreed, differed = (np.pad(m, (0, len(both) - len(m))) for m in (agreed, differed))
                before = int(np.count_nonzero(agreed & ~differed))
                known = before * 2 > int(np.count_nonzero(agreed | differed)) and before > 0
                again = bool(np.any(both & agreed))  # one that was compared before is compared again
                agreed[now_same] = True
                differed |= both & ~same
                self._compared[key] = agreed, differed
                if known and again:
                    group.append(i)
                    break
                if len(now_same) * 2 > int(np.count_nonzero(both)):
                    break
            else:
                groups.append([i])
        return [g for g in groups if len(g) > 1]


def _differing(columns: Array, has: Array, group: list[int]) -> tuple[Mask, Mask]:
    """Which weights all of a group have, and which of them are not the same on all. [S] each"""
    at = np.array(group)
    both = has[at].all(axis=0)
    return both, both & (columns[at] != columns[at[0]]).any(axis=0)


def _hex(value: Any) -> str:
    return f"{int(value) & (1 << 64) - 1:016x}"
