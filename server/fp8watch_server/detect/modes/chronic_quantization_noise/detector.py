"""Quantisation noise: mode 21, chronic-quantization-noise.

Shapes:     tile SQNR and underflow [S] -> a finding for those that began together
Thread:     detect worker

Three tests. Absolute: E4M3 gives 31.5 dB on healthy data whatever the scale, over ten octaves; a site that stays under
the band of its format was never healthy, and no baseline shows that. Relative: a lasting drop of the SQNR under the
site's own baseline, which other detectors explain where they can; what nothing explains is reported here with its
onset. A scale that follows amax of steps before lags in a young model, whose amax climbs: it is judged when statistics are warm.
Bias: noise averages out over steps, and a gain error of an input or a weight does not (`families.gain`), where its values are of many sizes. An operand
that lost half of its energy, or is off by more than rounding can, is no matter of granularity: quantiser-fault.

Features of distances, and others that decay without end, have tiles that are nothing beside the largest, and elements that are
nothing beside the largest of their tile, and lose all of that: of an input that as a whole is inside its band, and of which
those are enough for what is lost, this is information. Gradients of single tokens fade as far in any healthy training, and
excuse nothing. Of an input with scales of its own whose energy is spread over many elements, small elements that become 0 are
information as well (`small_elements`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fp8watch_server.detect.context import SQNR_FLOOR_DB, Context, damage
from fp8watch_server.detect.cross_rank_step import CrossRankStep, Floats
from fp8watch_server.detect.detector import Detector
from fp8watch_server.detect.families import gain
from fp8watch_server.detect.finding import Evidence, Finding
from fp8watch_server.detect.hysteresis import Latch, Rows, began_apart
from fp8watch_server.detect.modes.chronic_quantization_noise import small_elements
from fp8watch_server.detect.modes.chronic_quantization_noise.faint_parts import FaintParts, has_faint_tiles
from fp8watch_server.detect.step_view import GRAD_OUTPUT, INPUT, WEIGHT, Mask

SIGMA = 6.0
DEEP_DB = 6.0
"""Under its band by so much, a site is told after three samples: it has one in 64 steps where they go round."""
ORDINARY_DB = 3.0
"""Over its band by so much, a format does what it does to dense values (31.5 dB of E4M3): who stood higher had zeros, or few values."""
SOUND_AT_FIRST = 2
"""Looks inside the limit, of the ten of an alarm, with which a site had it from the first on."""

TOGETHER_SAMPLES = 20
"""As long as an incident stays open without a finding: what begins later than the first of them is another."""


class _Seen(NamedTuple):
    """One step's tests, of each site. [S]"""

    band: Floats  # least SQNR in dB
    chronic: Mask
    fast: Mask
    rounded: Mask
    drop: Mask
    off: Mask  # beyond the gain that is allowed
    error: Floats
    allowed: Floats
    whole_db: Floats
    small: Mask
    loud: bool  # anything is more than information


class Noise(Detector):
    """Sites whose quantiser loses too much."""

    modes = ("chronic-quantization-noise",)

    def __init__(self, num_sites: int) -> None:
        self._chronic = Latch(num_sites, 8, 10)
        self._flushed = Latch(num_sites, 8, 10)  # counts come more often than the SQNR: each has its own window
        self._drop = Latch(num_sites, 4, 6)
        self._deep = Latch(num_sites, 3, 4)
        self._biased = Latch(num_sites, 8, 10)
        self._faint = np.zeros(
            num_sites, dtype=np.bool_
        )  # what is lost may be all of faint tiles, as far as was measured last
        self._parts: dict[int, list[Evidence]] = {}  # of those: what is faint of them
        # of inputs that lose small elements alone: how their energy was spread when it was measured last
        self._spread = np.full((num_sites, small_elements.WIDTH), np.nan)
        # looks inside the limit before an alarm, of SQNR, underflow and gain
        self._sound = np.zeros((3, num_sites), dtype=np.int64)

    def grow(self, num_sites: int) -> None:
        """More sites were registered."""
        for latch in (self._chronic, self._flushed, self._drop, self._deep, self._biased):
            latch.grow(num_sites)
        if (more := num_sites - len(self._faint)) > 0:
            self._faint = np.concatenate([self._faint, np.zeros(more, dtype=np.bool_)])
            self._spread = np.concatenate([self._spread, np.full((more, small_elements.WIDTH), np.nan)])
            self._sound = np.concatenate([self._sound, np.zeros((3, more), dtype=np.int64)], axis=1)

    def frozen(self) -> Mask:
        """Sites whose SQNR dropped. A chronic one has no other baseline to keep."""
        return self._drop.open

    def observe(self, ctx: Context) -> list[Finding]:
        """Judge one step."""
        now, limit = ctx.now, ctx.limit
        band = np.where(now.table.e5m2, limit.chronic_sqnr_e5m2_db, limit.chronic_sqnr_e4m3_db)
        band[now.table.four_bit] = limit.chronic_sqnr_e2m1_db
        # four bits flush a tenth to 0, and clip the largest of a block, at their best
        forward = ((now.table.role == INPUT) | (now.table.role == WEIGHT)) & ~now.table.four_bit
        with np.errstate(divide="ignore", invalid="ignore"):
            noisy = self._lasting(now.sqnr_db < band, now) & ~_lags(ctx)
            flushed = forward & (now.underflow > limit.chronic_underflow) & ~_lags(ctx)
            whole_db = 10.0 * np.log10(now.column("signal_energy") / now.column("noise_energy"))
            fades = (whole_db >= band) & (has_faint_tiles(now) | flushed) & (now.table.role == INPUT)
        faintest = FaintParts(now, np.flatnonzero(fades))
        fades[faintest.rows] = faintest.explain(band, limit.chronic_underflow)
        self._faint = np.where(np.isnan(whole_db), self._faint, fades)
        self._parts |= {int(row): faintest.evidence(int(row)) for row in faintest.rows[fades[faintest.rows]]}
        self._spread = np.where(np.isnan(whole_db)[:, None], self._spread, small_elements.spread(now, band, whole_db))
        if not ctx.clean:
            return []
        chronic = self._chronic.update(noisy, ~np.isnan(now.sqnr_db), now.step)
        with np.errstate(invalid="ignore"):
            deep = noisy & (now.sqnr_db < band - DEEP_DB) & now.table.current_scaling
        fast = self._deep.update(deep, ~np.isnan(now.sqnr_db), now.step)
        rounded = self._flushed.update(flushed, forward & ~np.isnan(now.underflow), now.step)
        error, signal, noise = gain.of_now(now)
        amax = now.column("amax_max")
        room, allowed = gain.of_one_size(now.column, now.table.e5m2), gain.allowed(now, limit.chronic_gain)
        off = forward & gain.beyond(error, amax, signal, noise, now.table.e5m2, allowed, room)
        biased = self._biased.update(off & ~now.nonfinite & ~_lags(ctx), ~np.isnan(error), now.step)
        drop = np.zeros(len(now), dtype=np.bool_)
        if ctx.warm:
            need = np.maximum(limit.sqnr_drop_db, SIGMA * ctx.base.sqnr.spread(SQNR_FLOOR_DB))
            with np.errstate(invalid="ignore"):
                fell = (ctx.sqnr_drop > need) & (now.sqnr_db < band + ORDINARY_DB)
                drop = self._drop.update(self._lasting(fell, now), ~np.isnan(ctx.sqnr_drop), now.step)
        alarms = (self._chronic.open | self._deep.open, self._flushed.open, self._biased.open)
        sound = (now.sqnr_db >= band, forward & ~flushed & ~np.isnan(now.underflow), ~off & ~np.isnan(error))
        self._sound += np.array([well & ~alarm for well, alarm in zip(sound, alarms, strict=True)])
        hit = chronic | fast | rounded | drop | biased
        if not hit.any():
            return []
        faint = self._faint.copy()
        faint[now.table.across[self._faint & (now.table.across >= 0)]] = True  # the same elements, in tiles across
        small = rounded & ~np.isnan(self._spread[:, 0]) & ~(chronic | fast | drop | biased)
        loud = hit & ~small & ~(faint & ~(noisy & ~self._faint) & ~drop & ~biased)
        seen = _Seen(
            band, chronic, fast, rounded, drop, off, error, np.fmax(allowed, room), whole_db, small, bool(loud.any())
        )
        latches = (self._chronic, self._deep, self._flushed, self._biased, self._drop)
        within = TOGETHER_SAMPLES * (np.median(np.diff(ctx.base.steps)) if len(ctx.base.steps) > 1 else 1.0)
        groups = began_apart(now.in_flow(loud if seen.loud else hit), latches, float(within))
        return [self._finding(ctx, rows, seen) for rows in groups]

    def _finding(self, ctx: Context, rows: Rows, seen: _Seen) -> Finding:
        """What is said of rows whose alarms began together, in data-flow order."""
        now, limit, row = ctx.now, ctx.limit, int(rows[0])
        # In one step a part of the sites has an SQNR: those in alarm are counted, not those of this step.
        others = self._chronic.open | self._flushed.open | self._deep.open | self._biased.open
        num_noisy = int(np.count_nonzero(self.frozen() | others))
        onset, chronic, small = bool(seen.drop[row]), bool(seen.chronic[row]), bool(seen.small[row])
        by = "drop" if onset else "sqnr" if chronic or seen.fast[row] else "underflow" if seen.rounded[row] else "gain"
        latch = {
            "gain": self._biased,
            "drop": self._drop,
            "sqnr": self._chronic if chronic else self._deep,
            "underflow": self._flushed,
        }[by]
        since = int(latch.since[row])
        sqnr, usual = float(now.sqnr_db[row]), float(ctx.base.sqnr.median()[row])
        share, error, whole_db = float(now.underflow[row]), float(seen.error[row]), float(seen.whole_db[row])
        least = f"{seen.band[row]:g} or more"
        evidence = []
        if np.isfinite(sqnr):
            wanted = round(usual, 2) if onset else least
            evidence.append(
                Evidence("tile_sqnr_db", round(sqnr, 2), wanted, "dB", since if by != "underflow" else now.step)
            )
        if np.isfinite(share):
            most = f"{limit.chronic_underflow:g} or less"
            evidence.append(
                Evidence("underflow_ratio", round(share, 4), most, "share", since if by == "underflow" else now.step)
            )
        if by == "underflow":
            evidence.reverse()  # what made it fire comes first
        if np.isfinite(error) and seen.off[row]:
            told = Evidence("gain_error", round(error, 4), f"±{seen.allowed[row]:.3g}", "share", since)
            evidence.insert(0 if by == "gain" else len(evidence), told)
        clamped = now.column("num_eps_tiles")[row]
        if clamped > 0:
            evidence.append(Evidence("num_eps_tiles", int(clamped), 0, "tiles", since))
        evidence += [e for e in damage(ctx, row) if e.field == "num_saturated"]
        fades_out = not seen.loud and not small
        if small:
            evidence += small_elements.evidence(self._spread[row])
        if fades_out and np.isfinite(whole_db):
            evidence.append(Evidence("sqnr_db", round(whole_db, 2), least, "dB", now.step))
            evidence += self._parts.get(row) or self._parts.get(_along(now, row), [])
        evidence.append(Evidence("noisy_sites", num_noisy, 0, f"of {int(np.count_nonzero(now.seen))} sites", since))
        return now.finding(
            "chronic-quantization-noise",
            "warning" if seen.loud else "info",
            rows,
            evidence,
            "fp8",
            tile="noise_tile",
            field="tile_noise_ratio_max",
            onset=since if onset else None,
            began=since,
            sampled=by != "underflow",
            faint=fades_out,
            small=small,
            by=by,
            from_first=bool(self._sound[{"underflow": 1, "gain": 2}.get(by, 0), row] <= SOUND_AT_FIRST),
            sqnr_db=sqnr,
        )

    @staticmethod
    def _lasting(noisy: Mask, now: CrossRankStep) -> Mask:
        """Gradients whose single tokens fade below what the format can hold are no noise that anybody hears."""
        return np.asarray(np.where(now.table.role == GRAD_OUTPUT, now.table.of_channels(noisy), noisy))


def _along(now: CrossRankStep, row: int) -> int:
    """The site with the same elements in tiles along the rows, −1 where there is none."""
    found = np.flatnonzero(now.table.across == row)
    return int(found[0]) if len(found) else -1


def _lags(ctx: Context) -> Mask:
    """Sites whose scale follows amax of steps before, while a young model's amax still climbs: what that costs, the history catches up
    with. [S]"""
    return np.asarray(~ctx.now.table.current_scaling & (not ctx.warm))
