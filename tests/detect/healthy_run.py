"""A healthy training, as the collector would receive it: real wire bodies around made-up sketches."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from fp8watch_agent.record import STEP, Measured, Site, StepPresent, StepStatus, empty_rows, site_id
from fp8watch_agent.wire import Batch, Header, decode_batch, encode_batch
from fp8watch_server.detect.finding import SiteFacts, facts_of

MODULES = [
    f"layers.{i}.{name}"
    for i in range(2)
    for name in (
        "attn.q_proj",
        "attn.k_proj",
        "attn.v_proj",
        "attn.o_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    )
]
# operand, direction, the GEMM that reads it, tile
OPERANDS = [
    ("input", "rowwise", "fprop", (1, 128)),
    ("weight", "rowwise", "fprop", (128, 128)),
    ("grad_output", "rowwise", "dgrad", (1, 128)),
    ("grad_output", "columnwise", "wgrad", (128, 1)),
]
ALL = Measured.COUNTS | Measured.AMAX | Measured.SCALE | Measured.RATIO | Measured.ENERGIES


def make_sites(*, power_2_scale: bool = True, eps: float = 0.0, recipe: str = "blockwise") -> list[Site]:
    """Sites of a two-layer model in data-flow order: forward, then backward."""
    sites = []
    for m, module in enumerate(MODULES):
        for k, (operand, direction, gemm, tile) in enumerate(OPERANDS):
            forward = k < 2
            order = 2 * m + k if forward else 2 * len(MODULES) + 2 * (len(MODULES) - 1 - m) + k - 2
            sites.append(
                Site(
                    id=site_id(module, operand, direction),
                    module=module,
                    operand=operand,
                    direction=direction,
                    gemm=gemm,
                    order=order,
                    shape=(256, 256),
                    tile=tile,
                    format="E4M3",
                    power_2_scale=power_2_scale,
                    eps=eps,
                    recipe=recipe,
                    backend="reference",
                    evidence={},
                )
            )
    return sites


class Run:
    """Builds the batches of one run. `change(rows, scalars, step)` puts a fault in before a step is encoded."""

    def __init__(
        self,
        *,
        seed: int = 0,
        rank: int = 0,
        session: str | None = None,
        lr: float = 2e-3,
        growth: float = 0.005,
        power_2_scale: bool = True,
        with_loss: bool = True,
        eps: float = 0.0,
        recipe: str = "blockwise",
        gradient_wander_octaves: float = 0.05,
    ) -> None:
        self.sites = make_sites(power_2_scale=power_2_scale, eps=eps, recipe=recipe)
        self.by_name = {(s.module, s.operand, s.direction): i for i, s in enumerate(self.sites)}
        self.roles = np.array([s.operand for s in self.sites])
        self.rng = np.random.default_rng(seed)
        self.rank, self.session, self.power_2_scale = rank, session or f"{rank:032x}", power_2_scale
        self.lr: Callable[[int], float | None] = lambda step: lr
        self.growth: Callable[[int], float] = lambda step: growth * 0.99**step
        self.with_loss, self.wander = with_loss, gradient_wander_octaves
        self.seq = 0
        self._log2_weight = np.log2(self.rng.uniform(0.1, 0.3, len(MODULES)))
        self._log2_gradient = -12.0

    @property
    def facts(self) -> dict[int, SiteFacts]:
        return facts_of(self.sites)

    def index(self, module: str, operand: str, direction: str = "rowwise") -> int:
        """Record of a site within each step."""
        return self.by_name[(module, operand, direction)]

    def rows_of_step(self, step: int) -> np.ndarray:
        """[num_sites] of ROW, healthy."""
        n, rng = len(self.sites), self.rng
        rows = empty_rows(n)
        self._log2_weight += rng.normal(self.growth(step), 0.001, len(MODULES))
        self._log2_gradient = float(np.clip(self._log2_gradient + rng.normal(0, self.wander), -15.0, -9.0))
        amax = np.empty(n)
        amax[self.roles == "input"] = np.exp2(rng.normal(2.0, 0.09, len(MODULES)))
        amax[self.roles == "weight"] = np.exp2(self._log2_weight)
        gradients = self.roles == "grad_output"
        amax[gradients] = np.exp2(self._log2_gradient + rng.normal(0, 0.9, int(gradients.sum())))
        rows["num_elements"], rows["num_nonzero"], rows["num_tiles"] = 256 * 256, 256 * 256, 512
        rows["num_tiles"][self.roles == "weight"] = 4
        rows["num_zero_tiles"][gradients] = rng.integers(0, 5, int(gradients.sum()))
        rows["num_underflow"] = rng.integers(0, 200, n)
        rows["num_calls"] = 1
        rows["amax_max"], rows["amax_min_nonzero"] = amax, amax / 16
        scale = 448.0 / amax
        if self.power_2_scale:
            scale = np.exp2(np.floor(np.log2(scale)))
            rows["scale_ratio_max"], rows["scale_ratio_min"] = np.minimum(amax * scale / 448 * 1.05, 1.0), 0.501
        else:
            rows["scale_ratio_max"], rows["scale_ratio_min"] = 1 + 1e-7, 1 - 1e-7
        rows["scale_inv_max"], rows["scale_inv_min"] = 1 / scale, 1 / scale / 16
        rows["signal_energy"], rows["noise_energy"] = 1.0, 10**-3.16
        rows["tile_noise_ratio_sum"] = (rows["num_tiles"] - rows["num_zero_tiles"]) * 10**-3.16
        rows["tile_noise_ratio_max"] = 10**-2.9
        rows["worst_tile"], rows["noise_tile"] = (3, 1), (2, 0)
        rows["order"] = [s.order for s in self.sites]
        rows["measured"] = int(ALL)
        return rows

    def batch(self, steps: Iterable[int], change: Callable[[np.ndarray, np.ndarray, int], None] | None = None) -> Batch:
        """One decoded body that holds these steps."""
        steps = list(steps)
        scalars = np.zeros(len(steps), dtype=STEP)
        all_rows = []
        for k, step in enumerate(steps):
            s = scalars[k : k + 1]
            lr = self.lr(step)
            s["step"], s["status"], s["time"] = step, int(StepStatus.OK), 1e9 + step
            s["present"] = int((StepPresent.LR if lr is not None else 0) | (StepPresent.LOSS if self.with_loss else 0))
            s["loss"] = 2.5 + 3.0 * np.exp(-step / 50) + self.rng.normal(0, 0.1)
            s["lr"] = lr or 0.0
            rows = self.rows_of_step(step)
            if change is not None:
                change(rows, s, step)
            all_rows.append(rows)
        rows = np.concatenate(all_rows)
        ids = np.tile(np.array([s.id for s in self.sites], dtype=np.uint64), len(steps))
        header = Header(
            run="run",
            session=self.session,
            rank=self.rank,
            seq=self.seq,
            step0=steps[0],
            num_steps=len(steps),
            num_records=len(rows),
        )
        self.seq += 1
        return decode_batch(encode_batch(header, scalars, np.repeat(scalars["step"], len(self.sites)), ids, rows))
