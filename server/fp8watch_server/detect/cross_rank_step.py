"""One step over all ranks, as the statistical detectors see it: every field a dense column over the registered sites.

Shapes:     views of one step, one a rank -> columns [S] float64, NaN where nothing was measured
Thread:     detect worker

Ranks are rolled up as the fields say (`record.FIELDS`): counts are summed, extremes are kept. All ranks together cost
one scatter a column.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fp8watch_agent.record import EVERY_CALL, FIELD_BY_NAME, Measured, StepStatus, holds, lacking
from fp8watch_server.detect.finding import Evidence, Finding, Severity, SiteFacts, Verdict
from fp8watch_server.detect.step_view import Mask, SiteTable, StepView

Floats = npt.NDArray[np.float64]


class Experts(NamedTuple):
    """Each expert of a site in one step, [E]: ranks together."""

    amax: Floats  # the largest
    tokens: Floats  # the sum; 0 of a weight
    rank: npt.NDArray[np.int64]  # whose amax it is


class CrossRankStep:
    """The columns of one step; of a round of steps the newest records of each site.

    Args:
        views: of the step, one a rank.
        earlier: steps before it, in order, in which other sites had their turn: their records count where a rank has no newer
            one of a site. Scalars, logs and experts are those of the step.
    """

    def __init__(self, views: Sequence[StepView], table: SiteTable, earlier: Sequence[CrossRankStep] = ()) -> None:
        self.views, self.table, self.earlier = list(views), table, list(earlier)
        self.sources = [*self.views, *self._older()] if earlier else self.views
        self.step = views[0].step
        self.ranks = tuple(sorted({v.rank for v in views}))
        self._columns: dict[str, Floats] = {}
        self._groups: dict[Measured, Mask] = {}

    def __len__(self) -> int:
        return len(self.table)

    def _older(self) -> Iterator[StepView]:
        """Records of the earlier steps that their rank has no newer ones of."""
        have: dict[int, Mask] = {}
        steps = [step.views for step in reversed(self.earlier)]
        for i, view in enumerate(view for views in [self.views, *steps] for view in views):
            mine = have.setdefault(view.rank, np.zeros(len(self), dtype=np.bool_))
            new = ~mine[view.row]
            mine[view.row] = True
            if i >= len(self.views) and new.any():
                yield view.only(new)

    def measured_at(self, row: int) -> int:
        """The step that the newest record of a site is of."""
        return next((view.step for view in self.sources if np.any(view.row == row)), self.step)

    def column(self, name: str) -> Floats:
        """A scalar field over all ranks; NaN where it was not measured. [S]"""
        got = self._columns.get(name)
        if got is None:
            got = self._columns[name] = self._rolled_up(name)
        return got

    def beside(self, name: str, group: Measured) -> Floats:
        """A field over those ranks whose records hold `group` as well: what is divided by, where full samples go round and
        one rank has energies in a step in which the others have counts alone. [S]"""
        key = f"{name}/{int(group)}"
        got = self._columns.get(key)
        if got is None:
            got = self._columns[key] = self._rolled_up(name, self._measured(group))
        return got

    def _rolled_up(self, name: str, only: Mask | None = None) -> Floats:
        field, (_, row, _) = FIELD_BY_NAME[name], self._records
        values = self._of_all(name)
        known = self._measured(field.group) if only is None else self._measured(field.group) & only
        got = np.full(len(self), np.nan)
        if len(self.sources) == 1:
            got[row] = np.where(known, values, np.nan)
            return got
        known = known & ~np.isnan(values)  # not in place: other fields of the group ask for that mask
        values, row = values[known], row[known]
        if field.merge == "sum":
            rolled = np.bincount(row, values, minlength=len(self))  # in the order of the ranks
        else:
            rolled = np.full(len(self), math.inf if field.merge == "min" else -math.inf)
            (np.minimum if field.merge == "min" else np.maximum).at(rolled, row, values)
        got[row] = rolled[row]
        return got

    def _of_all(self, name: str) -> Floats:
        """A field of all records of all ranks. [N]"""
        return np.concatenate([view.columns.raw(name)[view.part] for view in self.sources]).astype(np.float64)

    def first_ranks(self) -> npt.NDArray[np.int64]:
        """The lowest rank with a record of each site; -1 where none has one. [S]"""
        _, row, place = self._records
        ranks = np.array([view.rank for view in self.sources], dtype=np.int64)[place]
        order = np.argsort(-ranks, kind="stable")
        first = np.full(len(self), -1, dtype=np.int64)
        first[row[order]] = ranks[order]
        return first

    def of_rank(self, name: str, rank: npt.NDArray[np.int64]) -> Floats:
        """A scalar field as one rank measured it, of each site another one; NaN where that rank has no record. [S]

        Args:
            name: of the field.
            rank: [S]
        """
        _, row, place = self._records
        values = self._of_all(name)
        values[~self._measured(FIELD_BY_NAME[name].group)] = np.nan
        mine = np.array([view.rank for view in self.sources], dtype=np.int64)[place] == rank[row]
        got = np.full(len(self), np.nan)
        got[row[mine]] = values[mine]
        return got

    def holders(self, name: str) -> tuple[npt.NDArray[np.uint64], Mask]:
        """Of each site: which ranks measured a field, as one number, and whether they measured different values. [S]"""
        _, row, place = self._records
        values = self._of_all(name)
        known = self._measured(FIELD_BY_NAME[name].group) & ~np.isnan(values)
        values, row, place = values[known], row[known], place[known]
        numbers = (np.array([view.rank for view in self.sources], dtype=np.uint64) + np.uint64(1)) * _SPREADING
        which, least = np.zeros(len(self), dtype=np.uint64), np.full(len(self), math.inf)
        np.add.at(which, row, (numbers ^ (numbers >> np.uint64(29)))[place])  # a sum that other ranks hardly have
        np.minimum.at(least, row, values)
        apart = np.zeros(len(self), dtype=np.bool_)
        apart[row[values != least[row]]] = True
        return which, apart

    @cached_property
    def _records(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Of all records of all ranks: groups that were measured, row of the table, place of the rank in `views`. [N]"""
        measured = np.concatenate([view.raw("measured") for view in self.sources])
        row = np.concatenate([view.row for view in self.sources])
        return measured, row, np.repeat(np.arange(len(self.sources)), [len(view) for view in self.sources])

    def _measured(self, group: Measured) -> Mask:
        got = self._groups.get(group)
        if got is None:
            measured, row, _ = self._records
            got = self._groups[group] = holds(measured, group)
            if group & EVERY_CALL:  # as merge_measured: what one rank lacks is not known of all
                partly = np.zeros(len(self), dtype=bool)
                partly[row[(lacking(measured) & int(group)) != 0]] = True
                got &= ~partly[row]
        return got

    def scalar(self, name: str) -> float | None:
        """loss, grad_norm, lr or loss_scale: the mean over ranks of what was given; None where nothing was."""
        given = [v for view in self.views if (v := view.scalar(name)) is not None]
        if not given:
            return None
        if len(given) == 1:
            return given[0]
        return (
            float(np.mean(given)) if all(map(math.isfinite, given)) else next(v for v in given if v != v or v in _INF)
        )

    @cached_property
    def logs(self) -> dict[str, float]:
        """What was given to `watch.log`: the largest over ranks."""
        out: dict[str, float] = {}
        for view in self.views:
            for name, value in view.logs().items():
                out[name] = value if name not in out or value > out[name] or value != value else out[name]
        return out

    @cached_property
    def experts(self) -> dict[int, Experts]:
        """Row of the table -> what its experts saw, of the sites that sent it in this step."""
        out: dict[int, Experts] = {}
        for view in self.views:
            for row, vector in view.experts:
                amax, tokens = vector["amax"].astype(np.float64), vector["num_tokens"].astype(np.float64)
                rank, known = np.full(len(vector), view.rank), out.get(row)
                if known is not None and len(known.amax) == len(amax):
                    larger = ~(known.amax >= amax)
                    rank = np.where(larger, rank, known.rank)
                    amax, tokens = np.where(larger, amax, known.amax), known.tokens + tokens
                if known is None or len(known.amax) <= len(amax):
                    out[row] = Experts(amax, tokens, rank)
        return out

    @property
    def skipped(self) -> bool:
        """A step without an update."""
        return any(v.status != StepStatus.OK for v in self.views)

    @property
    def batch_id(self) -> str | None:
        """Name of the data batch, of the first rank that gives one."""
        return next((v.batch_id for v in self.views if v.batch_id is not None), None)

    @cached_property
    def nonfinite(self) -> Mask:
        """Sites that saw a NaN or an Inf on some rank. [S]"""
        mask = np.zeros(len(self), dtype=np.bool_)
        for view in self.sources:
            nonfinite = view.nonfinite
            if nonfinite.any():
                mask[view.row[nonfinite]] = True
        return mask

    @cached_property
    def seen(self) -> Mask:
        """Sites that sent anything. [S]"""
        mask = np.zeros(len(self), dtype=np.bool_)
        mask[self._records[1]] = True
        return mask

    # ---- derived columns, [S], NaN where they are not known

    def _log2(self, name: str) -> Floats:
        with np.errstate(divide="ignore", invalid="ignore"):
            log2 = np.log2(self.column(name))
        return np.where(np.isfinite(log2) & ~self.nonfinite, log2, np.nan)

    @cached_property
    def log2_amax(self) -> Floats:
        """log2 of the largest tile amax."""
        return self._log2("amax_max")

    @cached_property
    def log2_amin(self) -> Floats:
        """log2 of the smallest tile amax above 0."""
        return self._log2("amax_min_nonzero")

    @cached_property
    def clip_depth(self) -> Floats:
        """Largest amax·scale/FP8_MAX of a tile."""
        ratio = self.column("scale_ratio_max")
        return np.where((ratio > 0) & np.isfinite(ratio) & ~self.nonfinite, ratio, np.nan)

    @cached_property
    def log2_scale_inv(self) -> Floats:
        """log2 of the largest scale_inv of a tile."""
        return self._log2("scale_inv_max")

    @cached_property
    def sqnr_db(self) -> Floats:
        """Tile SQNR: −10·log10 of the mean over non-zero tiles of noise/signal."""
        energies = Measured.ENERGIES
        tiles = self.beside("num_tiles", energies) - np.nan_to_num(self.beside("num_zero_tiles", energies))
        with np.errstate(divide="ignore", invalid="ignore"):
            db = -10.0 * np.log10(self.column("tile_noise_ratio_sum") / tiles)
        return np.where(np.isfinite(db) & ~self.nonfinite, db, np.nan)

    @cached_property
    def underflow(self) -> Floats:
        """Share of the non-zero elements that became 0."""
        with np.errstate(divide="ignore", invalid="ignore"):
            share = self.column("num_underflow") / self.column("num_nonzero")
        return np.where(np.isfinite(share), share, np.nan)

    @cached_property
    def all_zero(self) -> Mask:
        """Sites whose every tile is zero."""
        tiles = self.column("num_tiles")
        return np.asarray((tiles > 0) & (self.column("num_zero_tiles") >= tiles) & ~self.nonfinite)

    @cached_property
    def log2_kurtosis(self) -> Floats:
        """log2 of n·Σ(x/amax)⁴ / (Σ(x/amax)²)²: 1.58 is a normal distribution."""
        with np.errstate(divide="ignore", invalid="ignore"):
            n = self.beside("num_nonzero", Measured.MOMENTS)
            log2 = np.log2(n * self.column("moment4") / self.column("moment2") ** 2)
        return np.where(np.isfinite(log2), log2, np.nan)

    def histogram(self, name: str, rows: npt.NDArray[np.int64]) -> Floats:
        """One of HISTOGRAMS of some sites, summed over those ranks whose records hold energies as well; 0 where none does. [R, buckets]

        Args:
            name: of the field.
            rows: of the table, [R].
        """
        field = FIELD_BY_NAME[name]
        found, place = np.zeros((len(rows), field.size)), np.full(len(self), -1)
        place[rows] = np.arange(len(rows))
        for view in self.sources:
            of = place[view.row]
            asked = (of >= 0) & view.has(field.group) & view.has(Measured.ENERGIES)
            np.add.at(found, of[asked], view.raw(name)[asked])
        return found

    # ---- places

    def in_flow(self, mask: Mask) -> npt.NDArray[np.int64]:
        """Rows of the mask, in data-flow order."""
        at = np.flatnonzero(mask)
        return at[np.argsort(self.table.order[at], kind="stable")]

    def rank_of(self, row: int, field: str = "amax_max") -> int:
        """The rank whose value of a field is the one of the roll-up."""
        best, rank = -math.inf, self.ranks[0]
        for view in self.sources:
            at = np.flatnonzero(view.row == row)
            value = float(view.values(field)[at[0]]) if len(at) else math.nan
            if FIELD_BY_NAME[field].merge == "min":
                value = -value
            if value > best:
                best, rank = value, view.rank
        return rank

    def tile(self, name: str, row: int, rank: int) -> tuple[int, int] | None:
        """A tile coordinate of a site on a rank."""
        for view in self.sources:
            if view.rank == rank and len(at := np.flatnonzero(view.row == row)):
                return view.tile(name, int(at[0]))
        return None

    def channel(self, row: int, rank: int) -> int | None:
        """Column of the largest element of a site on a rank, from the site of its other direction, whose tiles are one column
        wide. None where there is none, or where it lies outside of the site's own worst tile.
        """
        across, own = int(self.table.across[row]), self.tile("worst_tile", row, rank)
        if across < 0 or own is None or self.table.facts[across].tile[1] != 1:
            return None
        tile, width = self.tile("worst_tile", across, rank), self.table.facts[row].tile[1]
        return tile[1] if tile is not None and tile[1] // max(width, 1) == own[1] else None

    def finding(
        self,
        mode: str,
        severity: Severity,
        rows: npt.NDArray[np.int64],
        evidence: Sequence[Evidence],
        verdict: Verdict,
        *,
        tile: str | None = None,
        field: str = "amax_max",
        rank: int | None = None,
        **extra: Any,
    ) -> Finding:
        """A finding at the first of `rows`; without rows, at the whole step.

        Args:
            rows: of the table, the named one first.
            tile: the field with the coordinate to name.
            field: the field whose rank is named.
        """
        named = int(rows[0]) if len(rows) else None
        facts: SiteFacts | None = self.table.facts[named] if named is not None else None
        where = rank if rank is not None else self.ranks[0] if named is None else self.rank_of(named, field)
        at = self.tile(tile, named, where) if tile and named is not None else None
        if at is None and tile == "noise_tile" and named is not None:  # known of full samples; the largest is of each
            at = self.tile("worst_tile", named, where)
        if tile == "worst_tile" and named is not None and facts is not None and facts.operand == "input":
            extra.setdefault("channel", self.channel(named, where))
        if self.earlier and named is not None:  # evidence has the step that it was measured in
            at_step = self.measured_at(named)
            evidence = [replace(e, since_step=at_step) if e.since_step == self.step else e for e in evidence]
        ids = [int(i) for i in self.table.ids[rows[:256]]] if len(rows) else []
        roles = list(dict.fromkeys(self.table.facts[int(r)].operand for r in rows[:256]))
        return Finding(
            mode=mode,
            severity=severity,
            step=self.step,
            rank=where,
            site=None if facts is None else facts.id,
            tile=at,
            element=None,
            evidence=tuple(evidence),
            verdict=verdict,
            rank_in_flow=0 if facts is None else facts.order,
            extra={"sites": ids, "num_sites": len(rows), "operands": roles, **extra},
        )


_INF = (math.inf, -math.inf)
_SPREADING = np.uint64(0x9E3779B97F4A7C15)


def measured(now: CrossRankStep, group: Measured) -> Mask:
    """Sites that hold this group on some rank. [S]"""
    mask = np.zeros(len(now), dtype=np.bool_)
    mask[now._records[1][now._measured(group)]] = True
    return mask
