"""A run as arrays over (step, site): made up after a calibration on real training, changed by faults, cut into batches.

Every column is [steps, sites]. A fault is a function that changes the columns from its onset on; the healthy twin of a
faulty run is the same trace without it. `Trace.delayed` gives the scales of a per-tensor recipe with a history.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fp8watch_agent.expert_vectors import VECTOR, ExpertVector
from fp8watch_agent.record import STEP, Measured, Site, StepPresent, site_id
from fp8watch_agent.wire import Batch, Header
from fp8watch_server.detect.finding import SiteFacts, facts_of
from fp8watch_server.detect.sessions import SessionFacts

CALIBRATION = json.loads((Path(__file__).parent / "calibration.json").read_text())
KINDS = (
    "attention.q_proj",
    "attention.k_proj",
    "attention.v_proj",
    "attention.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
OPERANDS = (
    ("input", "rowwise", "fprop", (1, 128)),
    ("input", "columnwise", "wgrad", (128, 1)),
    ("weight", "rowwise", "fprop", (128, 128)),
    ("grad_output", "rowwise", "dgrad", (1, 128)),
    ("grad_output", "columnwise", "wgrad", (128, 1)),
)
ALL = Measured.COUNTS | Measured.AMAX | Measured.SCALE | Measured.RATIO | Measured.ENERGIES | Measured.MOMENTS
TOKENS, TILES = 256, 512
SQNR_BY_DEPTH = ((0.0, 0.0), (0.2, 0.5), (1.0, 8.0), (2.0, 22.0), (3.0, 30.0), (12.0, 60.0))
"""(octaves of clip depth, dB lost): half the scale costs 8 dB, a quarter 22 dB."""


def make_sites(
    num_layers: int, *, recipe: str = "blockwise", power_2_scale: bool = True, hybrid: bool = False
) -> list[Site]:
    """Sites in data-flow order: the forward of all layers, then the backward."""
    modules = [f"layers.{i}.{kind}" for i in range(num_layers) for kind in KINDS]
    per_tensor = recipe in ("delayed", "current")
    sites = []
    for m, module in enumerate(modules):
        for k, (operand, direction, gemm, tile) in enumerate(OPERANDS):
            if per_tensor and direction == "columnwise":
                continue
            order = 3 * m + k if k < 3 else 3 * len(modules) + 2 * (len(modules) - 1 - m) + k - 3
            sites.append(
                Site(
                    id=site_id(module, operand, direction),
                    module=module,
                    operand=operand,
                    direction=direction,
                    gemm=gemm,
                    order=order,
                    shape=(TOKENS, 256),
                    tile=(TOKENS, 256) if per_tensor else tile,
                    format="E5M2" if hybrid and operand == "grad_output" else "E4M3",
                    power_2_scale=power_2_scale and not per_tensor,
                    eps=0.0,
                    recipe=recipe,
                    backend="reference",
                    evidence={},
                )
            )
    return sites


def fp8_max(site: Site) -> float:
    return 57344.0 if site.format == "E5M2" else 448.0


@dataclass
class Trace:
    """Columns [T, S] and scalars [T] of one rank."""

    sites: list[Site]
    columns: dict[str, np.ndarray]
    steps: np.ndarray  # [T] of STEP
    logs: dict[str, np.ndarray] = field(default_factory=dict)
    batch_ids: list[str | None] = field(default_factory=list)
    rank: int = 0
    session: str = "0" * 32
    sessions: list[SessionFacts] = field(default_factory=list)
    experts: dict[int, np.ndarray] = field(default_factory=dict)
    """Site -> VECTOR [T, E], of which each third step sends one."""

    # ---- finding one's way

    @property
    def num_steps(self) -> int:
        return len(self.steps)

    @property
    def facts(self) -> dict[int, SiteFacts]:
        return facts_of(self.sites)

    def mask(self, module: str | None = None, operand: str | None = None, direction: str | None = None) -> np.ndarray:
        """Sites by name; a module matches its end. [S]"""
        return np.array(
            [
                (module is None or s.module.endswith(module))
                and (operand is None or s.operand == operand)
                and (direction is None or s.direction == direction)
                for s in self.sites
            ]
        )

    def one(self, module: str, operand: str, direction: str = "rowwise") -> int:
        at = np.flatnonzero(self.mask(module, operand, direction))
        assert len(at) == 1, (module, operand, direction, len(at))
        return int(at[0])

    def add_sites(self, sites: list[Site], **columns: float) -> np.ndarray:
        """More sites, with constant columns; returns their indices."""
        for name, values in self.columns.items():
            fill = columns.get(
                name, 0 if name not in ("first_nonfinite", "off_scale_tile", "worst_tile", "noise_tile") else -1
            )
            shape = (values.shape[0], len(sites), *values.shape[2:])
            self.columns[name] = np.concatenate([values, np.full(shape, fill, dtype=values.dtype)], axis=1)
        first = len(self.sites)
        self.sites = [*self.sites, *sites]
        return np.arange(first, first + len(sites))

    # ---- changing what is there

    def grow(self, mask: np.ndarray, octaves: np.ndarray) -> None:
        """Multiply amax of sites by 2^octaves[t]; a current scale follows."""
        factor = np.exp2(octaves)[:, None]
        c = self.columns
        for name in ("amax_max", "amax_min_nonzero"):
            c[name][:, mask] *= factor
        self.rescale(mask)

    def rescale(self, mask: np.ndarray) -> None:
        """Scales as current scaling computes them."""
        c = self.columns
        for j in np.flatnonzero(mask):
            s = self.sites[j]
            if s.recipe == "delayed":
                continue
            top = fp8_max(s)
            for name, amax in (("scale_inv_max", c["amax_max"][:, j]), ("scale_inv_min", c["amax_min_nonzero"][:, j])):
                scale = top / np.where(amax > 0, amax, top)
                c[name][:, j] = 1 / (np.exp2(np.floor(np.log2(scale))) if s.power_2_scale else scale)

    def set_sqnr(self, mask: np.ndarray, db: np.ndarray) -> None:
        """Tile SQNR of sites. db [T] or [T, sites of the mask]."""
        db = db[:, None] if db.ndim == 1 else db
        tiles = np.maximum(self.columns["num_tiles"][:, mask] - self.columns["num_zero_tiles"][:, mask], 1)
        self.columns["tile_noise_ratio_sum"][:, mask] = tiles * 10 ** (-db / 10)

    def sqnr(self, mask: np.ndarray) -> np.ndarray:
        tiles = np.maximum(self.columns["num_tiles"][:, mask] - self.columns["num_zero_tiles"][:, mask], 1)
        return -10 * np.log10(self.columns["tile_noise_ratio_sum"][:, mask] / tiles)

    def set_kurtosis(self, mask: np.ndarray, factor: np.ndarray) -> None:
        self.columns["moment4"][:, mask] *= factor[:, None]

    def delayed(self, history: int = 64, margin: int = 0, *, frozen_from: dict[int, int] | None = None) -> None:
        """Scales from a history of amax, ratios and SQNR that follow. `frozen_from`: site -> step of its last update."""
        c = self.columns
        for j, s in enumerate(self.sites):
            if s.recipe != "delayed":
                continue
            amax, top = c["amax_max"][:, j], fp8_max(s)
            last = np.array([amax[max(0, t - history) : t].max() if t else amax[0] for t in range(len(amax))])
            if frozen_from and j in frozen_from:
                t0 = frozen_from[j]
                last[t0:] = last[t0]
            scale = top / 2.0**margin / last
            c["scale_inv_max"][:, j] = c["scale_inv_min"][:, j] = 1 / scale
            depth = amax * scale / top
            c["scale_ratio_max"][:, j] = c["scale_ratio_min"][:, j] = depth
            lost = np.interp(np.log2(np.maximum(depth, 1.0)), *zip(*SQNR_BY_DEPTH, strict=True))
            one = np.zeros(len(self.sites), dtype=bool)
            one[j] = True
            self.set_sqnr(one, self.sqnr(one)[:, 0] - lost)
            c["num_saturated"][:, j] = np.where(depth > 464 / 448, 1 + (depth - 1) * 20, 0)

    def give_experts(self, j: int, num: int, seed: int = 0) -> np.ndarray:
        """Make a site one of experts, which lie within two octaves of each other; returns their vectors [T, E]."""
        rng = np.random.default_rng([seed, j, 5])
        vectors = self.experts[j] = np.zeros((self.num_steps, num), dtype=VECTOR)
        apart = rng.uniform(-2, 0, num) + 0.1 * rng.standard_normal((self.num_steps, num))
        apart[:, 0] = 0.0
        vectors["amax"] = self.columns["amax_max"][:, [j]] * np.exp2(apart)
        if self.sites[j].operand != "weight":
            vectors["num_tokens"] = rng.integers(40, 90, (self.num_steps, num))
        return vectors

    # ---- handing it over

    def batches(self, per_batch: int = 8, every: int = 1) -> Iterator[Batch]:
        """Decoded bodies, without the detour over the wire. `every` samples: other steps come without records."""
        ids = np.array([s.id for s in self.sites], dtype=np.uint64)
        for seq, first in enumerate(range(0, self.num_steps, per_batch)):
            part = slice(first, min(first + per_batch, self.num_steps))
            kept = [t for t in range(part.start, part.stop) if t % every == 0]
            steps = self.steps[part]
            number = len(kept) * len(ids)
            header = Header(
                run="run", session=self.session, rank=self.rank, seq=seq, step0=int(steps["step"][0]),
                num_steps=len(steps), num_records=number,
                logs={k: [None if v != v else float(v) for v in x[part]] for k, x in self.logs.items()},
                batch_ids=self.batch_ids[part] if self.batch_ids else [],
            )  # fmt: skip
            sent = {k: v[kept].reshape(number, *v.shape[2:]) for k, v in self.columns.items()}
            step = np.repeat(self.steps["step"][kept], len(ids)) if kept else np.zeros(0, dtype=np.int64)
            vectors = [
                ExpertVector(int(steps["step"][t - first]), int(ids[j]), of_site[t])
                for t in range(part.start, part.stop) for j, of_site in self.experts.items() if (t + j) % 3 == 0
            ]  # fmt: skip
            site = np.tile(ids, len(kept))
            yield Batch(header=header, steps=steps, step=step, site=site, sent=sent, experts=vectors)


def _ar(rng: np.random.Generator, num: int, sigma: np.ndarray, phi: np.ndarray, heavy: np.ndarray) -> np.ndarray:
    """AR(1) paths [num, S] with standard deviation sigma; Student's t where heavy."""
    noise = rng.standard_normal((num, len(sigma)))
    tails = np.sqrt(5 / rng.chisquare(5, (num, len(sigma)))) * np.sqrt(3 / 5)
    noise = np.where(heavy, np.clip(noise * tails, -4, 4), noise)  # the largest that was recorded: 4.7 octaves
    out = np.empty_like(noise)
    out[0] = noise[0]
    step = np.sqrt(1 - phi**2)
    for t in range(1, num):
        out[t] = phi * out[t - 1] + step * noise[t]
    return out * sigma


def healthy(
    seed: int = 0,
    num_steps: int = 240,
    num_layers: int = 3,
    *,
    recipe: str = "blockwise",
    power_2_scale: bool = True,
    hybrid: bool = False,
    lr: np.ndarray | None = None,
    growth: float = 0.0025,
    first_step: int = 0,
    early_growth: bool = True,
) -> Trace:
    """A healthy run after the calibration: each site its own level, spread and memory."""
    rng = np.random.default_rng([seed, 20])
    sites = make_sites(num_layers, recipe=recipe, power_2_scale=power_2_scale, hybrid=hybrid)
    table = [CALIBRATION["sites"][f"{s.module.rsplit('.', 1)[1]}/{s.operand}/{s.direction}"] for s in sites]
    n, T = len(sites), num_steps
    role = np.array([s.operand for s in sites])
    grads, weights = role == "grad_output", role == "weight"

    def series(name: str, spread: float = 0.0) -> np.ndarray:
        mean, sigma, phi = np.array([e[name] for e in table]).T
        sigma = np.where(weights & (name == "amax"), 0.0, sigma)
        return mean + rng.normal(0, spread, n) + _ar(rng, T, sigma, phi, grads & (name == "amax"))

    log2_amax = series("amax", 0.3)
    log2_amax[:, grads] += np.cumsum(rng.normal(0, 0.1, T))[:, None] + rng.standard_t(5, T)[:, None] * 0.25
    own = np.clip(rng.normal(1.0, 0.3, n), 0.3, 2)  # each layer grows at its own pace
    at = np.arange(first_step, first_step + T)
    speed = (0.02 * np.exp(-at / 25) if early_growth else 0.0) + growth * np.exp(-at / 400)
    drift = np.cumsum(own[None, :] * np.broadcast_to(speed, (T,))[:, None], axis=0)
    wiggle = np.cumsum(rng.normal(0, CALIBRATION["weight_step_sigma"] * 0.5, (T, n)), axis=0)
    log2_amax[:, weights] += (drift + wiggle)[:, weights]
    gap = np.maximum(series("gap"), 0)
    if recipe in ("delayed", "current"):
        gap[:] = 0
    underflow = np.clip(np.exp2(series("underflow")) - 1e-5, 0, 0.4)
    sqnr, kurtosis = series("sqnr"), np.exp2(series("kurtosis"))
    sqnr[:, [s.format == "E5M2" for s in sites]] -= 6.0  # one mantissa bit less
    elements = np.full((T, n), TOKENS * 256)
    tiles = np.where(weights, 4, TILES) if recipe not in ("delayed", "current") else np.ones(n, dtype=int)
    c: dict[str, np.ndarray] = {
        "amax_max": np.exp2(log2_amax),
        "amax_min_nonzero": np.exp2(log2_amax - gap),
        "num_elements": elements,
        "num_nonzero": elements.copy(),
        "num_underflow": (underflow * elements).astype(np.int64),
        "num_saturated": np.zeros((T, n), dtype=np.int64),
        "num_nan": np.zeros((T, n), dtype=np.int64),
        "num_inf": np.zeros((T, n), dtype=np.int64),
        "num_tiles": np.broadcast_to(tiles, (T, n)).copy(),
        "num_zero_tiles": np.zeros((T, n), dtype=np.int64),
        "num_eps_tiles": np.zeros((T, n), dtype=np.int64),
        "num_sentinel_tiles": np.zeros((T, n), dtype=np.int64),
        "num_off_scale_tiles": np.zeros((T, n), dtype=np.int64),
        "scale_inv_max": np.ones((T, n)),
        "scale_inv_min": np.ones((T, n)),
        "scale_ratio_max": np.ones((T, n)) if not power_2_scale else rng.uniform(0.9, 1.0, (T, n)),
        "scale_ratio_min": np.ones((T, n)) if not power_2_scale else rng.uniform(0.5, 0.55, (T, n)),
        "tile_noise_ratio_sum": np.zeros((T, n)),
        "moment2": np.full((T, n), elements[0, 0] / 9.0),
        "moment4": kurtosis * (elements[0, 0] / 9.0) ** 2 / elements[0, 0],
        "worst_tile": np.full((T, n, 2), (3, 1)),
        "noise_tile": np.full((T, n, 2), (2, 0)),
        "off_scale_tile": np.full((T, n, 2), -1),
        "first_nonfinite": np.full((T, n, 3), -1),
        "order": np.broadcast_to(np.array([s.order for s in sites]), (T, n)).copy(),
        "measured": np.full((T, n), int(ALL)),
    }
    c["num_zero_tiles"][:, grads & (tiles > 1)] = rng.integers(0, 5, (T, int((grads & (tiles > 1)).sum())))
    steps = np.zeros(T, dtype=STEP)
    steps["step"], steps["time"] = at, 1e9 + at
    steps["present"] = int(StepPresent.LOSS | StepPresent.GRAD_NORM | StepPresent.LR)
    steps["loss"] = 2.2 + 1.2 * np.exp(-at / 120) + 2.5 * np.exp(-at / 15) + rng.normal(0, CALIBRATION["loss_sigma"], T)
    steps["grad_norm"] = np.exp2(rng.standard_t(4, T) * CALIBRATION["log2_grad_norm_sigma"] * 0.7)
    steps["lr"] = 2e-3 if lr is None else lr
    trace = Trace(sites, c, steps, session=f"{seed:032x}")
    everything = np.ones(n, dtype=bool)
    trace.set_sqnr(everything, sqnr)
    trace.rescale(everything)
    if recipe == "delayed":
        trace.delayed()
    return trace


def evidence_of(found: Any) -> dict[str, Any]:
    return {e.field: e.value for e in found.evidence}
