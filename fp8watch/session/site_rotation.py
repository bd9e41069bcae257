"""Whose turn it is: in each step some sites are looked at in full, so that no step is a burst.

Shapes:     step -> one byte for each row of the slab
Thread:     training

Full statistics, checks of outputs and streamed tile maps come once in so many steps for each operand, evenly spread over
them, and each rank is at another place: data-parallel ranks together see each operand in nearly each step. Hashes of
weights have their turns by the weight alone, because replicas are compared by those of the same step.

Where operands are read for their statistics alone, as in recipe="observe", and that takes more than the budget in each
step, amax and counts have turns as well: all operands of a Linear in the same step. Then full statistics and outputs have
theirs among those.

Ranks whose scales must agree are compared by those of the same step. Where sites have turns and ranks share their amax, each
site has a turn more in 128 steps that goes by the site alone.

Both directions of an operand have their turn together, since one read gives both. So have the inputs of modules side by
side (q, k and v; gate and up), which may be one tensor, and all operands of a module of Transformer Engine.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from fp8watch.observer.nonfinite_checks import OUTPUTS_EVERY
from fp8watch.observer.step_sample import EVERYTHING, NO, YES, ByRow, StepSample
from fp8watch.session.attachment import Attachment, Cadence
from fp8watch.session.sampling_schedule import Schedule
from fp8watch.session.sites import SlabSite

Ints = npt.NDArray[np.int64]
COMMON_EVERY = 128
"""Steps in which each site is looked at once in the same step on all ranks, where their scales are to be compared."""


class Turns:
    """Gives each unit its turn once in a period, evenly spread over its steps.

    Args:
        units: of each row, numbered from 0 without a gap; −1 for rows that never have a turn.
        rank, world_size: ranks have their turns at different steps.
    """

    def __init__(self, units: Ints, rank: int = 0, world_size: int = 1) -> None:
        self._units, self._rank, self._world_size = units, rank, world_size
        self._num_units = int(units.max(initial=-1)) + 1
        self._period, self._turns = 0, units

    def of(self, step: int, period: int) -> bytes:
        """Of each row whether its turn is in this step. [rows]"""
        if period != self._period:
            first = self._units * period // max(self._num_units, 1)
            self._turns = np.where(self._units < 0, -1, (first + self._shift(period)) % period)
            self._period = period
        turn: bytes = (self._turns == step % period).tobytes()
        return turn

    def _shift(self, period: int) -> int:
        few = self._world_size <= period
        return self._rank * period // self._world_size if few else self._rank % period


class SiteRotation:
    """What each step of one watch looks at.

    Args:
        units: of each row of the slab, see `rotating_units`.
        weights: of each row the number of its weight among the weights; −1 for all others.
        together: of each row the number of what is looked at in the same steps, see `light_units`.
        schedule: when weights are hashed.
        tile_maps: as in `attach(tile_maps=)`, checked.
        late: the device is read late, and reading outputs costs more there.
    """

    def __init__(
        self,
        units: Ints,
        weights: Ints,
        together: Ints,
        schedule: Schedule,
        tile_maps: tuple[str, int],
        *,
        rank: int = 0,
        world_size: int = 1,
        late: bool = False,
    ) -> None:
        self._full, self._outputs, self._maps = (Turns(units, rank, world_size) for _ in range(3))
        self._units, self._light, self._together = units, Turns(together, rank, world_size), together
        self._hashes, self._hash_every = Turns(weights), schedule.hash_every
        self._common = Turns(units)
        self._mode, self._late = tile_maps, late

    def sample(
        self,
        step: int,
        every: int,
        light_every: int,
        *,
        first: bool,
        full: bool,
        outputs: bool,
        followed: Sequence[int] = (),
        common: bool = False,
    ) -> StepSample:
        """What a step looks at.

        Args:
            step: its number, counted by ones.
            every: steps in which each site has one turn.
            light_every: steps in which each Linear is looked at once.
            first: nothing was observed in the step before: everything is looked at, to show what there is.
            full: full statistics of all sites.
            outputs: all outputs and gradients.
            followed: rows with full statistics whoever's turn it is.
            common: scales of ranks are to be compared.
        """
        mode, n = self._mode
        maps: ByRow = self._maps.of(step, n) if mode == "every" else YES if mode == "all" else NO
        hashes: ByRow = self._hashes.of(step, self._hash_every) if self._hash_every else NO
        if first:
            return replace(EVERYTHING, hashes=YES if self._hash_every else NO, maps=maps)
        period = max(every, OUTPUTS_EVERY) if self._late else every
        light: ByRow = YES
        if light_every == 1:
            mine = self._full.of(step, every)
            looked = mine if period == every else self._outputs.of(step, period)
        else:
            light = self._light.of(step, light_every)
            mine, looked = (self._among(light, step, light_every, n) for n in (every, period))
            if maps is YES or full or outputs:
                light = YES
            elif maps is not NO:
                light = self._whole_units(light, maps)
        if common and not full:
            mine = _either(mine, self._common.of(step, COMMON_EVERY))
        if followed and not full:
            mine = self._with(mine, followed)
        if (common or followed) and not full and isinstance(light, bytes):
            light = self._whole_units(light, mine)
        return StepSample(
            full=YES if full else mine,
            outputs=YES if outputs else looked,
            hashes=hashes,
            maps=maps,
            any_full=full or 1 in mine,
            any_outputs=True,
            gradients=(0, 1) if outputs else (step % period, period),
            light=light,
        )

    def _with(self, mine: bytes, followed: Sequence[int]) -> bytes:
        """Of each row whether its turn is in this step, or it is one of these, or has its turn with one of these. [rows]"""
        also = np.isin(self._units, self._units[list(followed)])
        turn: bytes = (np.frombuffer(mine, dtype=np.bool_) | also).tobytes()
        return turn

    def _among(self, light: bytes, step: int, light_every: int, every: int) -> bytes:
        """Of each row whether its turn is in this step: of the turns in which its Linear is looked at, one in so many. [rows]"""
        mine = (step // light_every + self._units) % max(1, round(every / light_every)) == 0
        turn: bytes = (np.frombuffer(light, dtype=np.bool_) & mine).tobytes()
        return turn

    def _whole_units(self, light: bytes, maps: ByRow) -> bytes:
        """Of each row whether it is looked at, or one of its Linear is whose tile map is to leave, or whose turn it is. [rows]"""
        mine = np.frombuffer(light, dtype=np.bool_) | np.array([maps[row] for row in range(len(light))], dtype=np.bool_)
        units = np.zeros(len(mine), dtype=np.bool_)
        units[self._together[mine]] = True
        turn: bytes = units[self._together].tobytes()
        return turn


def _either(one: bytes, other: bytes) -> bytes:
    turn: bytes = (np.frombuffer(one, dtype=np.bool_) | np.frombuffer(other, dtype=np.bool_)).tobytes()
    return turn


def rotating_units(table: Sequence[SlabSite], together: Iterable[Sequence[int]] = ()) -> Ints:
    """Which rows have their turn together: [rows], numbered in the order of the rows.

    Args:
        table: one a row.
        together: rows that cannot be told apart, such as those of one module of Transformer Engine.
    """
    keys: list[Hashable] = [_unit(site) for site in table]
    for rows in together:
        for row in rows:
            keys[row] = ("together", rows[0])
    return _numbered(keys, lambda row: True)


def light_units(table: Sequence[SlabSite], together: Iterable[Sequence[int]] = ()) -> Ints:
    """Which rows are looked at in the same steps: those of a Linear, and of Linears that may read the same input. [rows]"""
    of_input = {site.fqn: _unit(site) for site in table if site.operand == "input" and not site.probed}
    keys: list[Hashable] = [of_input.get(site.fqn, site.fqn) for site in table]
    for rows in together:
        for row in rows:
            keys[row] = ("together", rows[0])
    return _numbered(keys, lambda row: True)


def weight_units(table: Sequence[SlabSite], is_weight: Callable[[int], bool]) -> Ints:
    """Numbers of the rows that are weights; −1 for others. [rows]"""
    return _numbered(range(len(table)), is_weight)


def site_rotation(attachment: Attachment, cadence: Cadence, rank: int, world_size: int) -> SiteRotation:
    """The turns of the sites of one attach."""
    plan, table, te = attachment.plan, attachment.table, attachment.te
    late = plan is not None and plan.slab is not None and plan.slab.device.type == "cuda"
    together = te.rows_of.values() if te is not None else ()
    weights = weight_units(table, (lambda row: False) if plan is None else plan.sites.is_weight)
    return SiteRotation(
        rotating_units(table, together), weights, light_units(table, together), cadence.schedule, cadence.tile_maps,
        rank=rank, world_size=world_size, late=late,
    )  # fmt: skip


def _unit(site: SlabSite) -> Hashable:
    parent, _, name = site.fqn.rpartition(".")
    if site.probed:  # what a head is given is looked at when its output is
        return site.fqn, "output"
    if site.operand == "input" and not name.isdecimal():  # numbers are layers one after the other
        return parent, site.width
    return site.fqn, site.operand


def _numbered(keys: Sequence[Hashable], takes_part: Callable[[int], bool]) -> Ints:
    numbers: dict[Hashable, int] = {}
    return np.array(
        [numbers.setdefault(key, len(numbers)) if takes_part(row) else -1 for row, key in enumerate(keys)],
        dtype=np.int64,
    )
