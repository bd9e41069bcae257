"""Wire bodies of one synthetic rank, with sketches like those of a healthy training.

Shapes:     (plan, rank) -> wire bodies, [steps x sites] records of ROW each
Thread:     any; pure

Everything is a function of (seed, rank, step), so the same plan gives the same bytes, and the same records however the
steps are cut into batches. Values vary as in training: counts hardly change, amax is in bfloat16, energies use all
their bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fp8watch_agent.record import FIELDS, STEP, Measured, Site, StepPresent, TileMap, empty_rows
from fp8watch_agent.wire import Header, encode_batch, encode_tile_maps
from fp8watch_server.load.model import SiteTraits, make_sites, traits_of

Array = npt.NDArray[Any]
Change = Callable[[Array, Array, int, int], None]
"""(rows [S] of ROW, step row of STEP, rank, step): puts a fault in, in place."""

SAMPLED = int(Measured.ENERGIES | Measured.MOMENTS | Measured.DEPTH)
EVERYTHING = SAMPLED | int(Measured.COUNTS | Measured.AMAX | Measured.SCALE | Measured.RATIO)
FP8_MAX = 448.0
EPOCH = 1_700_000_000.0


@dataclass(frozen=True)
class LoadPlan:
    """A synthetic run.

    Args:
        num_ranks, num_sites, num_steps: its size; records are their product.
        steps_per_batch: as the agent's sender would bundle them.
        every: full statistics each n-th step; in between records have no energies, moments and depth.
        seed: all numbers follow from it.
        first_step: step of the first batch.
        step_s: seconds between steps, for the steps' own clock.
        merge_steps: from 2 on, a site leaves one record of its calm steps and a full one in so many steps, each site and
            each rank in steps of its own, as agents of many ranks send them; `every` is then without effect.
    """

    num_ranks: int = 1
    num_sites: int = 160
    num_steps: int = 100
    steps_per_batch: int = 1
    every: int = 1
    seed: int = 0
    run: str = "load"
    first_step: int = 0
    step_s: float = 1.0
    power_2_scale: bool = True
    merge_steps: int = 1

    def __post_init__(self) -> None:
        for name in ("num_ranks", "num_sites", "num_steps", "steps_per_batch", "every", "merge_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be 1 or more")

    @property
    def sites(self) -> list[Site]:
        """Sites to register."""
        return make_sites(self.num_sites, power_2_scale=self.power_2_scale)


@dataclass(frozen=True)
class Body:
    """One encoded batch."""

    seq: int
    step0: int
    num_steps: int
    num_records: int
    data: bytes


class RankStream:
    """The bodies of one rank, in order.

    Args:
        plan: the run.
        rank: 0 to num_ranks − 1.
        traits: of `traits_of(plan.sites, plan.seed)`, to be shared by the ranks of a process.
        session: of this attach; by default it follows from run, seed and rank.
        change: puts a fault in.
    """

    def __init__(
        self,
        plan: LoadPlan,
        rank: int = 0,
        *,
        traits: SiteTraits | None = None,
        session: str | None = None,
        change: Change | None = None,
    ) -> None:
        self.plan, self.rank, self.change = plan, rank, change
        self.traits = traits or traits_of(plan.sites, plan.seed)
        self.session = session or f"{plan.seed & 0xFFFFFFFF:08x}{rank:024x}"
        self.seq = 0

    def __iter__(self) -> Iterator[Body]:
        """All bodies of the plan."""
        p = self.plan
        for step in range(p.first_step, p.first_step + p.num_steps, p.steps_per_batch):
            yield self.body(range(step, min(step + p.steps_per_batch, p.first_step + p.num_steps)))

    def body(self, steps: range) -> Body:
        """Encode the next batch of steps."""
        header, columns = self.batch(steps)
        return Body(header.seq, header.step0, header.num_steps, header.num_records, encode_batch(header, *columns))

    def batch(self, steps: range) -> tuple[Header, tuple[Array, Array, Array, Array]]:
        """The next batch before encoding: header, and the arrays that `encode_batch` takes."""
        step_rows = np.zeros(len(steps), dtype=STEP)
        parts: list[Array] = []
        ids: list[Array] = []
        of_step: list[Array] = []
        for i, step in enumerate(steps):
            self._fill_step(step_rows[i : i + 1], step)
            rows = self.rows(step)
            if self.change is not None:
                self.change(rows, step_rows[i : i + 1], self.rank, step)
            leaves = self._lighten(rows, step)
            parts.append(rows[leaves])
            ids.append(self.traits.ids[leaves])
            of_step.append(np.full(len(parts[-1]), step, dtype=np.int64))
        rows = np.concatenate(parts)
        self.seq += 1
        header = Header(
            run=self.plan.run,
            session=self.session,
            rank=self.rank,
            seq=self.seq,
            step0=steps.start,
            num_steps=len(steps),
            num_records=len(rows),
            clock=float(step_rows["time"][-1]),
            health={"produced": float(steps.stop * len(self.traits.ids)), "overhead_ratio": 0.004},
        )
        return header, (step_rows, np.concatenate(of_step), np.concatenate(ids), rows)

    def _lighten(self, rows: Array, step: int) -> Array:
        """Take what only samples measure out of the others, in place; which of the sites [S] leave a record."""
        merge = self.plan.merge_steps
        turn = (np.arange(len(rows)) + self.rank + step) % merge
        broken = (rows["num_nan"] | rows["num_inf"]) != 0
        full = (turn == merge // 2) | broken if merge > 1 else np.full(len(rows), step % self.plan.every == 0)
        for f in FIELDS:
            if f.group & SAMPLED:  # between samples a record has no energies, moments and depth
                rows[f.name][~full] = f.default
        rows["measured"][~full] &= ~SAMPLED
        rows["num_calls"][~full] = merge
        if merge > 1:
            back = np.random.default_rng((self.plan.seed, 4, self.rank, step)).integers(0, merge, len(rows))
            rows["window_steps_back"][~full], rows["amax_steps_back"][~full] = merge - 1, back[~full]
            rows["measured"][~full] |= int(Measured.WINDOW)
        leaves: Array = full | (turn == 0)
        return leaves

    def _fill_step(self, row: Array, step: int) -> None:
        rng = np.random.default_rng((self.plan.seed, 2, self.rank, step))
        row["step"], row["time"] = step, EPOCH + step * self.plan.step_s + rng.uniform(0, 0.05)
        row["loss"] = np.float32(2.2 + 8.6 / (1.0 + step / 40.0) ** 0.7 + rng.normal(0, 0.05))
        row["grad_norm"] = np.float32(0.4 + 2.0 / (1.0 + step / 60.0) + abs(rng.normal(0, 0.03)))
        row["lr"] = 3e-4 * min(1.0, (step + 1) / 100)
        row["present"] = int(StepPresent.LOSS | StepPresent.GRAD_NORM | StepPresent.LR)

    def rows(self, step: int) -> Array:
        """[S] of ROW: one step of every site."""
        t, n = self.traits, len(self.traits.ids)
        rng = np.random.default_rng((self.plan.seed, 3, self.rank, step))
        rows = empty_rows(n)
        noise = rng.standard_normal((6, n), dtype=np.float32)
        drift = np.where(t.weight, 1.5 * (1.0 - np.exp(-step / 400.0)), -0.8 * (1.0 - np.exp(-step / 200.0)))
        middle = t.log2_amax + drift + t.wander * noise[0]
        top = middle + t.spread * (3.5 + 0.15 * np.abs(noise[1]))
        amax = _as_bfloat16(np.exp2(top))
        low = _as_bfloat16(np.exp2(middle - t.spread * (3.5 + 0.15 * np.abs(noise[2]))))
        rows["num_elements"], rows["num_tiles"], rows["num_calls"] = t.num_elements, t.num_tiles, 1
        zeros = np.rint(t.num_elements * np.where(t.gradient, 1e-4, 1e-6) * (1 + 0.1 * noise[3])).astype(np.int64)
        rows["num_nonzero"] = t.num_elements - zeros
        rows["num_underflow"] = np.rint(t.num_elements * t.underflow_share * np.exp2(0.3 * noise[0] + 0.05 * noise[4]))
        rows["amax_max"], rows["amax_min_nonzero"] = amax, low
        for name, value in (("scale_inv_max", amax), ("scale_inv_min", low)):
            rows[name] = 1.0 / self._scale(value)
        if self.plan.power_2_scale:
            rows["scale_ratio_max"], rows["scale_ratio_min"] = 1.0, 0.50195312
        else:
            rows["scale_ratio_max"], rows["scale_ratio_min"] = 1 + 1e-7, 1 - 1e-7
        ratio = 10.0 ** (-(t.sqnr_db + 0.02 * noise[5]) / 10.0)
        rms = np.exp2(middle) / 2.8
        rows["signal_energy"] = t.num_elements * rms**2 * (1.0 + 1e-3 * noise[4])
        rows["noise_energy"] = rows["signal_energy"] * ratio
        rows["tile_noise_ratio_sum"] = t.num_tiles * ratio * (1.0 + 1e-3 * noise[3])
        rows["tile_noise_ratio_max"] = ratio * (2.0 + 0.2 * np.abs(noise[1]))
        rows["moment2"] = t.num_elements * 0.128 * (1.0 + 1e-3 * noise[2])
        rows["moment4"] = t.num_elements * 0.049 * (1.0 + 1e-3 * noise[1])
        place = rng.integers(0, 1 << 30, (2, n, 2)) % t.grid
        rows["worst_tile"], rows["noise_tile"] = place[0], place[1]
        distance = (t.bucket[None, :] - middle[:, None]) / t.spread[:, None]
        share = np.exp(-0.5 * distance * distance)
        share *= (t.num_tiles / share.sum(axis=1))[:, None]
        jitter = rng.standard_normal(share.shape, dtype=np.float32)
        rows["amax_hist"] = np.rint(np.maximum(share + np.sqrt(share) * jitter, 0.0))
        rows["depth_hist"] = np.rint(t.depth_share * (t.num_elements * np.exp2(0.02 * noise[0]))[:, None])
        rows["order"] = np.arange(n)
        rows["measured"] = EVERYTHING
        return rows

    def _scale(self, amax: Array) -> Array:
        scale = FP8_MAX / amax.astype(np.float64)
        return np.exp2(np.floor(np.log2(scale))) if self.plan.power_2_scale else scale

    def tile_maps(self, step: int, num_maps: int, *, shape: tuple[int, int] = (64, 32), seq: int = 1) -> bytes:
        """A body with small tile maps of the first `num_maps` sites."""
        rng, tiles = np.random.default_rng((self.plan.seed, 4, self.rank, step)), shape[0] * shape[1]
        maps = [
            TileMap(
                site=int(site),
                step=step,
                shape=shape,
                amax=(_as_bfloat16(np.exp2(rng.normal(level, 0.6, tiles))).view(np.uint32) >> 16).astype(np.uint16),
                scale_inv=np.exp2(np.floor(rng.normal(level - 8.0, 0.6, tiles))).astype(np.float32),
                flags=np.zeros(tiles, dtype=np.uint8),
                num_nonfinite=np.zeros(tiles, dtype=np.uint16),
                num_underflow=rng.integers(0, 3, tiles).astype(np.uint16),
            )
            for site, level in zip(self.traits.ids[:num_maps].tolist(), self.traits.log2_amax, strict=False)
        ]
        return encode_tile_maps(self.plan.run, self.session, self.rank, seq, maps)


def _as_bfloat16(values: Array) -> Array:
    """Rounded to bfloat16, as float32."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded: Array = ((bits + np.uint32(0x8000)) & np.uint32(0xFFFF0000)).view(np.float32)
    return rounded
