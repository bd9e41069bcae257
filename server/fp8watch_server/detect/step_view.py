"""One step of one rank, as the detectors see it: columns, not records.

Shapes:     a batch of N records -> per step a view of its n records, columns [n]
Thread:     detect worker

Columns are taken from the batch once and sliced by step. A field of a group that was not measured reads as NaN
(or as a False mask), never as 0.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from fp8watch_agent.record import FIELD_BY_NAME, STEP_SCALARS, Measured, holds
from fp8watch_agent.wire import Batch
from fp8watch_server.detect.finding import MAX_SITES_IN_FINDING, OBSERVED, SiteFacts

Array = npt.NDArray[Any]
Mask = npt.NDArray[np.bool_]

INPUT, WEIGHT, GRAD_OUTPUT, OUTPUT = 0, 1, 2, 3
ROLES = ("input", "weight", "grad_output", "output")
"""`output` is a probe: what a module returned, never quantised, or what a Linear in high precision was given."""


_NUMBER = re.compile(r"\d+")
PER_TENSOR = ("delayed", "current")
"""Recipes with one scale a tensor."""


def _role(f: SiteFacts) -> int:
    return OUTPUT if f.is_probe else ROLES.index(f.operand) if f.operand in ROLES else -1


class SiteTable:
    """The registered sites as arrays, found by id without a loop. Rows are only ever appended: a row is for life."""

    def __init__(self, sites: Mapping[int, SiteFacts] | None = None) -> None:
        self.sites: dict[int, SiteFacts] = {}
        self._row_of: dict[int, int] = {}
        self._fill()
        self.add(sites or {})

    def add(self, sites: Mapping[int, SiteFacts]) -> bool:
        """Take sites in, or facts that changed; False where all of it was known."""
        if all(self.sites.get(i) == f for i, f in sites.items()):
            return False
        for i in sites:
            self._row_of.setdefault(i, len(self._row_of))
        self.sites.update(sites)
        self._fill()
        return True

    def _fill(self) -> None:
        self.facts = [self.sites[i] for i in self._row_of]
        facts = self.facts
        self.ids = np.array(list(self._row_of), dtype=np.uint64)
        self._by_id = np.argsort(self.ids, kind="stable").astype(np.int64)
        self._sorted = self.ids[self._by_id]
        self._asked: tuple[Array, npt.NDArray[np.int64]] | None = None
        self.role = np.array([_role(f) for f in facts], dtype=np.int8)
        self.order = np.array([f.order for f in facts], dtype=np.int64)
        self.power_2_scale = np.array([f.power_2_scale for f in facts], dtype=np.bool_)
        # A delayed scale comes from history: its ratio is the clip depth, not an invariant.
        self.current_scaling = np.array([f.recipe != "delayed" for f in facts], dtype=np.bool_)
        self.per_tensor = np.array([f.recipe in PER_TENSOR for f in facts], dtype=np.bool_)
        # MXFP8 rounds its scales up, so that it never clips.
        self.rounds_up = np.array([f.recipe == "mxfp8" for f in facts], dtype=np.bool_)
        self.observed = np.array([f.recipe == OBSERVED for f in facts], dtype=np.bool_)
        self.four_bit = np.array([f.format == "E2M1" for f in facts], dtype=np.bool_)
        self.e5m2 = np.array([f.format == "E5M2" for f in facts], dtype=np.bool_)
        self.eps = np.array([f.eps for f in facts], dtype=np.float64)
        self.num_columns = np.array([f.shape[1] for f in facts], dtype=np.int64)
        # Outputs of what runs before every GEMM that is seen, as of an embedding.
        first = self.order[self.role != OUTPUT].min(initial=1 << 62)
        self.before_gemms = (self.role == OUTPUT) & (self.order < first)
        # Tiles of one token. A per-tensor recipe has one tile for all of them.
        self.tiled = np.array([f.tile[0] == 1 for f in facts], dtype=np.bool_)
        self.rowwise = np.array([f.direction == "rowwise" for f in facts], dtype=np.bool_)
        names = {m: k for k, m in enumerate(dict.fromkeys(f.module for f in facts))}
        self.modules = list(names)
        self.module = np.array([names[f.module] for f in facts], dtype=np.int64)
        alike: dict[str, int] = {}
        # Modules with the same name but for a number: those of other layers, other experts.
        self.kind_of_module = np.array(
            [alike.setdefault(_NUMBER.sub("#", name), len(alike)) for name in self.modules], dtype=np.int64
        )
        columnwise = {(f.module, f.operand): k for k, f in enumerate(facts) if f.direction == "columnwise"}
        # Row of the columnwise site of the same operand, −1 where there is none: its tiles go across tokens.
        self.across = np.array(
            [columnwise.get((f.module, f.operand), -1) if f.direction == "rowwise" else -1 for f in facts],
            dtype=np.int64,
        )

    def __len__(self) -> int:
        return len(self.ids)

    def of_channels(self, hit: Mask) -> Mask:
        """What is left of a mask without sites that are hit by single tokens only.

        Where attention grows sharp, gradients of single tokens fade to nothing in healthy training. With tiles across
        tokens to ask, those must be hit as well; a gradient that has none is not judged by its single tokens.
        """
        asked = self.across >= 0
        alone = ~asked & self.rowwise & (self.role == GRAD_OUTPUT) & self.tiled
        return np.asarray(np.where(asked, hit & hit[self.across], hit & ~alone))

    def rows(self, site: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """Index of each site id in the table, −1 for those that are not registered."""
        if not len(self.ids):
            return np.full(len(site), -1, dtype=np.int64)
        if self._asked is not None and np.array_equal(self._asked[0], site):  # batches are alike
            return self._asked[1]
        at = np.minimum(np.searchsorted(self._sorted, site), len(self.ids) - 1)
        row = np.where(self._sorted[at] == site, self._by_id[at], -1)
        self._asked = site, row
        return row


class BatchColumns:
    """The records of a batch, sorted by step, without those of unknown sites."""

    def __init__(self, batch: Batch, table: SiteTable) -> None:
        row = table.rows(batch.site)
        keep: Any = slice(None)  # most often all of them, as they are
        if len(row) and row.min() < 0:
            keep = np.flatnonzero(row >= 0)
        if len(batch.steps) > 1 and np.any(np.diff(batch.step[keep]) < 0):
            keep = np.arange(len(row))[keep]
            keep = keep[np.argsort(batch.step[keep], kind="stable")]
        self.batch, self.table, self._keep = batch, table, keep
        self.row: npt.NDArray[np.int64] = row[keep]
        self.step: npt.NDArray[np.int64] = batch.step[keep]
        self.role: npt.NDArray[np.int8] = table.role[self.row]
        self._columns: dict[str, Array] = {}
        self._values: dict[str, npt.NDArray[np.float64]] = {}
        self._has: dict[Measured, Mask] = {}
        self._of_all: dict[tuple[Any, ...], Array] = {}

    def raw(self, name: str) -> Array:
        """The column as sent, defaults where it was left out. [N] or [N, size]"""
        got = self._columns.get(name)
        if got is None:
            got = self._columns[name] = self.batch.column(name)[self._keep]
        return got

    def has(self, group: Measured) -> Mask:
        """Which records hold this group of fields. [N]"""
        got = self._has.get(group)
        if got is None:
            got = self._has[group] = holds(self.raw("measured"), group)
        return got

    def of_all(self, judge: Callable[..., Array], *limits: float) -> Array:
        """What a function says of all records, as if they were of one step: asked once a batch. [N]

        Args:
            judge: of a view, which it judges record by record, and of the limits.
        """
        asked = judge, *limits
        got = self._of_all.get(asked)
        if got is None:
            got = self._of_all[asked] = judge(StepView(self, 0, slice(0, len(self.row))), *limits)
        return got

    @cached_property
    def scalars(self) -> dict[str, list[float | None]]:
        """loss, grad_norm, lr and loss_scale by step; None where one was not given."""
        steps = self.batch.steps
        out: dict[str, list[float | None]] = {}
        for name, bit in STEP_SCALARS.items():
            given = (steps["present"] & int(bit)) != 0
            out[name] = [v if there else None for v, there in zip(steps[name].tolist(), given.tolist(), strict=True)]
        return out

    def values(self, name: str) -> npt.NDArray[np.float64]:
        """A scalar field as float64, NaN where it was not measured. [N]"""
        got = self._values.get(name)
        if got is None:
            measured = self.has(FIELD_BY_NAME[name].group)
            got = self._values[name] = np.where(measured, self.raw(name).astype(np.float64), np.nan)
        return got

    @cached_property
    def nonfinite(self) -> Mask:
        """Records that saw a NaN or an Inf. [N]"""
        counts = self.has(Measured.COUNTS) & (self.raw("num_nan") > 0)
        return np.asarray(counts | self.infinite)

    @cached_property
    def infinite(self) -> Mask:
        """Records that saw an Inf: counted, or told by a tile whose amax is Inf. [N]"""
        counts = self.has(Measured.COUNTS) & (self.raw("num_inf") > 0)
        return np.asarray(counts | (self.has(Measured.AMAX) & (self.raw("num_sentinel_tiles") > 0)))

    @cached_property
    def experts(self) -> dict[int, list[tuple[int, Array]]]:
        """Step -> (row of the table, vector over experts)."""
        out: dict[int, list[tuple[int, Array]]] = {}
        vectors = self.batch.experts
        if vectors:
            rows = self.table.rows(np.array([v.site for v in vectors], dtype=np.uint64))
            for row, vector in zip(rows.tolist(), vectors, strict=True):
                if row >= 0:
                    out.setdefault(vector.step, []).append((row, vector.experts))
        return out

    def views(self) -> Iterator[StepView]:
        """One view per step of the batch, in order, steps without records included."""
        steps = self.batch.steps
        begin = np.searchsorted(self.step, steps["step"], side="left")
        end = np.searchsorted(self.step, steps["step"], side="right")
        for i in range(len(steps)):
            yield StepView(self, i, slice(int(begin[i]), int(end[i])))


@dataclass(frozen=True)
class StepView:
    """The records of one step on one rank. Columns are views of the batch's."""

    columns: BatchColumns
    index: int  # in batch.steps
    part: slice | npt.NDArray[np.int64]

    @property
    def step(self) -> int:
        """Absolute optimizer step."""
        return int(self.columns.batch.steps["step"][self.index])

    @property
    def rank(self) -> int:
        """Rank that sent it."""
        return int(self.columns.batch.header.rank)

    @property
    def status(self) -> int:
        """StepStatus."""
        return int(self.columns.batch.steps["status"][self.index])

    def scalar(self, name: str) -> float | None:
        """loss, grad_norm, lr or loss_scale of the step; None where it was not given."""
        return self.columns.scalars[name][self.index]

    def logs(self) -> dict[str, float]:
        """What was given to `watch.log` besides the scalars of a step."""
        at = ((name, values[self.index]) for name, values in self.columns.batch.header.logs.items())
        return {name: float(value) for name, value in at if value is not None}

    @property
    def experts(self) -> Iterator[tuple[int, Array]]:
        """Row of the table and vector over experts [E], of the sites that sent one in this step."""
        return ((row, vector) for row, vector in self.columns.experts.get(self.step, ()))

    @property
    def batch_id(self) -> str | None:
        """Name of the data batch, where the user gave one."""
        ids = self.columns.batch.header.batch_ids
        return str(ids[self.index]) if ids and ids[self.index] is not None else None

    def __len__(self) -> int:
        return int(self.part.stop - self.part.start) if isinstance(self.part, slice) else len(self.part)

    def only(self, mask: Mask) -> StepView:
        """The records of a mask over those of this one."""
        return StepView(self.columns, self.index, np.arange(len(self.columns.row))[self.part][mask])

    def raw(self, name: str) -> Array:
        """A column of this step, as sent."""
        return self.columns.raw(name)[self.part]

    def judged(self, judge: Callable[..., Array], *limits: float) -> Array:
        """What `BatchColumns.of_all` says of the records of this step."""
        return self.columns.of_all(judge, *limits)[self.part]

    def values(self, name: str) -> npt.NDArray[np.float64]:
        """A scalar field as float64, NaN where it was not measured."""
        return self.columns.values(name)[self.part]

    def has(self, group: Measured) -> Mask:
        """Which records hold this group."""
        return self.columns.has(group)[self.part]

    @property
    def row(self) -> npt.NDArray[np.int64]:
        """Index of each record's site in the table."""
        return self.columns.row[self.part]

    @property
    def role(self) -> npt.NDArray[np.int8]:
        """INPUT, WEIGHT or GRAD_OUTPUT of each record."""
        return self.columns.role[self.part]

    @property
    def nonfinite(self) -> Mask:
        """Records that saw a NaN or an Inf."""
        return self.columns.nonfinite[self.part]

    @property
    def infinite(self) -> Mask:
        """Records that saw an Inf."""
        return self.columns.infinite[self.part]

    @cached_property
    def flow(self) -> npt.NDArray[np.int64]:
        """Place of each record in the order of execution: as it ran, else as the model is written."""
        order = self.raw("order").astype(np.int64)
        return order if len(order) and bool(np.all(order >= 0)) else self.columns.table.order[self.row]

    def in_flow(self, mask: Mask) -> npt.NDArray[np.int64]:
        """Records of the mask, first in the order of execution first."""
        at = np.flatnonzero(mask)
        return at[np.argsort(self.flow[at], kind="stable")]

    def facts(self, i: int) -> SiteFacts:
        """Static facts of one record's site."""
        return self.columns.table.sites[int(self.columns.table.ids[self.row[i]])]

    def site_ids(self, at: Array) -> list[int]:
        """Site ids of records, at most MAX_SITES_IN_FINDING."""
        return [int(s) for s in self.columns.table.ids[self.row[at[:MAX_SITES_IN_FINDING]]]]

    def operands(self, at: Array) -> list[str]:
        """Roles that occur among records, in the order of ROLES."""
        return [ROLES[r] for r in sorted({int(r) for r in np.unique(self.role[at])}) if r >= 0]

    def element(self, i: int) -> tuple[tuple[int, int] | None, tuple[int, int] | None]:
        """(element, tile) of the first non-finite value of a record; None where it is not known."""
        row, column = (int(v) for v in self.raw("first_nonfinite")[i][:2])
        if row < 0 or column < 0:
            return None, None
        tile_rows, tile_columns = self.facts(i).tile
        return (row, column), (row // max(tile_rows, 1), column // max(tile_columns, 1))

    def tile(self, name: str, i: int) -> tuple[int, int] | None:
        """A tile coordinate of a record; None where it is not known."""
        row, column = (int(v) for v in self.raw(name)[i])
        return None if row < 0 or column < 0 else (row, column)
