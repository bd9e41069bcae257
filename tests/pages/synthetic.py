"""A run as an agent would send it: real bodies through the real codec and the real ingest, with a failure in it.

Shapes: 3 layers of 7 Linears, 5 sites each, tokens 256; step FAULT_STEP puts one Inf into one tile of one operand.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import quote

import httpx
import numpy as np
import sqlalchemy as sa

from fp8watch_agent.record import ROW, STEP, STEP_SCALARS, Measured, Site, TileFlag, TileMap, empty_rows, site_id
from fp8watch_agent.wire import (
    BATCH_CONTENT_TYPE,
    TILE_MAPS_CONTENT_TYPE,
    Header,
    encode_batch,
    encode_tile_maps,
)
from fp8watch_server.db import schema
from fp8watch_server.db.dialect import writing
from fp8watch_server.incidents.causes import cause_id

TOKENS, WIDTH, HIDDEN = 256, 256, 768
LINEARS = (
    ("attention.wq", WIDTH, WIDTH),
    ("attention.wk", WIDTH, WIDTH),
    ("attention.wv", WIDTH, WIDTH),
    ("attention.wo", WIDTH, WIDTH),
    ("mlp.gate_proj", HIDDEN, WIDTH),
    ("mlp.up_proj", HIDDEN, WIDTH),
    ("mlp.down_proj", WIDTH, HIDDEN),
)
OPERANDS = (
    ("input", "rowwise", "fprop"),
    ("input", "columnwise", "wgrad"),
    ("weight", "rowwise", "fprop"),
    ("grad_output", "rowwise", "dgrad"),
    ("grad_output", "columnwise", "wgrad"),
)
FAULT_STEP = 90
FAULT_MODULE = "layers.2.mlp.down_proj"
FAULT_TILE = (131, 3)
FAULT_SITE = site_id(FAULT_MODULE, "input", "rowwise")
ALL_MEASURED = int(Measured.COUNTS | Measured.AMAX | Measured.SCALE | Measured.RATIO | Measured.ENERGIES)


def make_sites(num_layers: int = 3, prefix: str = "layers") -> list[Site]:
    """Sites in data-flow order."""
    sites = []
    for layer in range(num_layers):
        for name, out_features, in_features in LINEARS:
            for operand, direction, gemm in OPERANDS:
                rows, columns = {
                    "input": (TOKENS, in_features),
                    "weight": (out_features, in_features),
                    "grad_output": (TOKENS, out_features),
                }[operand]
                module = f"{prefix}.{layer}.{name}"
                sites.append(
                    Site(
                        id=site_id(module, operand, direction),
                        module=module,
                        operand=operand,
                        direction=direction,
                        gemm=gemm,
                        order=len(sites),
                        shape=(rows, columns),
                        tile=(128, 128) if operand == "weight" else (1, 128) if direction == "rowwise" else (128, 1),
                        format="E4M3",
                        power_2_scale=True,
                        eps=0.0,
                        recipe="blockwise",
                        backend="reference",
                        evidence={"counts": "exact", "amax": "exact"},
                    )
                )
    return sites


def tile_shape(site: Site) -> tuple[int, int]:
    """Tiles of a site: rows, columns."""
    return -(-site.shape[0] // site.tile[0]), -(-site.shape[1] // site.tile[1])


def level_of(site: Site, step: int) -> float:
    """log2 of the typical tile amax."""
    base = {"input": 1.6, "weight": -3.2, "grad_output": -11.0, "output": 1.0}[site.operand]
    return base + 0.6 * np.sin(site.order * 0.7) + (0.5 if "down_proj" in site.module else 0.0) + 0.002 * step


def make_rows(sites: Sequence[Site], step: int, rng: np.random.Generator, *, fault: bool) -> np.ndarray[Any, Any]:
    """One step's record of every site."""
    rows = empty_rows(len(sites))
    for i, site in enumerate(sites):
        mt, kt = tile_shape(site)
        n, tiles_ = site.shape[0] * site.shape[1], mt * kt
        spread = {"input": 0.09, "weight": 0.004, "grad_output": 0.5, "output": 0.1}[site.operand]
        top = 2.0 ** (level_of(site, step) + 1.5 + spread * rng.standard_normal())
        low = top * 2.0 ** -(3.0 + rng.random())
        row = rows[i]
        row["num_elements"], row["num_nonzero"] = n, n - (n // 50 if site.operand == "grad_output" else 3)
        row["num_underflow"] = int(
            n * (0.004 if site.operand == "grad_output" else 0.0006) * (0.8 + 0.4 * rng.random())
        )
        row["num_tiles"], row["num_zero_tiles"] = tiles_, kt if site.operand == "grad_output" and mt > 1 else 0
        row["signal_energy"] = n * (top / 4) ** 2
        row["noise_energy"] = row["signal_energy"] * 10 ** (-(31.62 + 0.03 * rng.standard_normal()) / 10)
        row["tile_noise_ratio_sum"] = (tiles_ - row["num_zero_tiles"]) * 10 ** (
            -(31.65 + 0.04 * rng.standard_normal()) / 10
        )
        row["tile_noise_ratio_max"] = 10 ** (-29.8 / 10)
        row["amax_max"], row["amax_min_nonzero"] = top, low
        row["scale_inv_max"], row["scale_inv_min"] = (2.0 ** np.ceil(np.log2(v / 448)) for v in (top, low))
        row["scale_ratio_max"], row["scale_ratio_min"] = 0.99, 0.51
        middle = int(np.floor(np.log2(top))) + 48 - 2
        for k, share in zip(range(middle - 2, middle + 3), (0.06, 0.24, 0.42, 0.23, 0.05), strict=True):
            row["amax_hist"][np.clip(k, 1, 63)] = int(share * tiles_)
        row["amax_hist"][0] = row["num_zero_tiles"]
        row["worst_tile"] = (step * 7 % mt, step % kt)
        row["order"], row["num_calls"], row["measured"] = i, 1, ALL_MEASURED
        if fault and step == FAULT_STEP and site.id == FAULT_SITE:
            row["num_inf"], row["num_sentinel_tiles"] = 1, 1
            row["amax_max"], row["worst_tile"] = np.inf, FAULT_TILE
            row["scale_inv_max"] = 1.0
            row["tile_noise_ratio_sum"] += 0.62 * 1.0
            row["num_underflow"] += 96
            row["first_nonfinite"] = (FAULT_TILE[0], FAULT_TILE[1] * 128 + 17, 0)
    return rows


def make_steps(steps: Sequence[int], *, start: float, seed: int = 0) -> np.ndarray[Any, Any]:
    """Loss, gradient norm, learning rate of steps."""
    rng = np.random.default_rng((seed, steps[0]))
    out = np.zeros(len(steps), dtype=STEP)
    s = np.asarray(steps, dtype=np.float64)
    out["step"], out["present"] = steps, 7
    out["time"] = start + 0.25 * s
    out["loss"] = 2.4 + 3.2 * np.exp(-s / 40) + 0.04 * rng.standard_normal(len(s))
    out["grad_norm"] = 0.6 + 2.5 * np.exp(-s / 25) + 0.08 * np.abs(rng.standard_normal(len(s)))
    out["lr"] = 2e-3 * np.minimum(1.0, (s + 1) / 20)
    return out


def with_loss_scale(steps: np.ndarray[Any, Any], rows: np.ndarray[Any, Any]) -> None:
    """For `Run.send(change=...)`: every step logs a loss scale, too."""
    steps["loss_scale"] = 1024.0 * 2.0 ** (steps["step"] // 16)
    steps["present"] |= int(STEP_SCALARS["loss_scale"])


def make_tile_map(site: Site, step: int, rng: np.random.Generator, *, fault: bool) -> TileMap:
    """Every tile of a site."""
    mt, kt = tile_shape(site)
    amax = 2.0 ** (
        level_of(site, step) + 0.55 * rng.standard_normal((mt, kt)) + 0.5 * np.sin(np.arange(mt)[:, None] / 9)
    )
    if site.operand == "grad_output":
        amax[0] = 0.0
    scale_inv = np.where(amax > 0, 2.0 ** np.ceil(np.log2(np.maximum(amax, 1e-30) / 448)), 1.0)
    flags = np.where(amax == 0, int(TileFlag.ZERO), 0).astype(np.uint8)
    num_bad = np.zeros((mt, kt), np.uint16)
    num_underflow = rng.poisson(0.15, (mt, kt)).astype(np.uint16)
    flags[num_underflow > 0] |= int(TileFlag.UNDERFLOW)
    if fault and step == FAULT_STEP and site.id == FAULT_SITE:
        amax[FAULT_TILE], scale_inv[FAULT_TILE], num_bad[FAULT_TILE], num_underflow[FAULT_TILE] = np.inf, 1.0, 1, 96
        flags[FAULT_TILE] = int(TileFlag.INF | TileFlag.SENTINEL | TileFlag.UNDERFLOW)
    bits = (amax.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return TileMap(
        site=site.id,
        step=step,
        shape=(mt, kt),
        amax=bits.ravel(),
        scale_inv=scale_inv.astype(np.float32).ravel(),
        flags=flags.ravel(),
        num_nonfinite=num_bad.ravel(),
        num_underflow=num_underflow.ravel(),
    )


@dataclass
class Run:
    """A run that is sent step by step. `client` is anything that speaks HTTP to a collector."""

    client: httpx.Client
    run_id: str
    name: str
    sites: list[Site] = field(default_factory=make_sites)
    session: str = "5e55105e55105e55105e55105e55105e"
    seq: int = 0
    map_seq: int = 0
    rank: int = 0
    start: float = field(default_factory=lambda: time.time() - 60.0)

    def register(self, *, world_size: int = 1, said: dict[str, Any] | None = None) -> Run:
        """Run, session with the facts that it says, sites."""
        of_run = f"/v1/runs/{quote(self.run_id, safe='')}"
        facts = {"recipe": "blockwise", "backend": "reference", "world_size": world_size}
        self._ok(lambda: self.client.put(of_run, json={"name": self.name, **facts}))
        session = {"rank": self.rank, "host": "node-1", "pid": 4711, "started_at": self.start, **facts}
        session |= {"facts": said} if said else {}
        self._ok(lambda: self.client.put(f"{of_run}/sessions/{self.session}", json=session))
        sites = [asdict(s) for s in self.sites]
        self._ok(lambda: self.client.put(f"{of_run}/sites", json={"session": self.session, "sites": sites}))
        return self

    def send(
        self,
        steps: Sequence[int],
        *,
        fault: bool = True,
        change: Any = None,
        keep: Any = None,
        ended: bool = False,
        logs: dict[str, list[float | None]] | None = None,
    ) -> None:
        """One batch. `change(steps_array, rows)` may spoil it first; only records with `keep(step, site)` are sent."""
        rng = np.random.default_rng(steps[0])
        step_rows = make_steps(steps, start=self.start)
        rows = np.concatenate([make_rows(self.sites, s, rng, fault=fault) for s in steps]).astype(ROW)
        if change is not None:
            change(step_rows, rows)
        sent = np.array([keep is None or keep(step, site) for step in steps for site in self.sites], dtype=bool)
        rows = rows[sent]
        header = Header(
            run=self.run_id, session=self.session, rank=self.rank, seq=self.seq, step0=steps[0], num_steps=len(steps),
            num_records=len(rows), clock=time.time(), health={"ended": 1.0} if ended else {},
            logs=logs or {},
        )  # fmt: skip
        site = np.tile(np.array([s.id for s in self.sites], dtype=np.uint64), len(steps))
        body = encode_batch(header, step_rows, np.repeat(np.asarray(steps), len(self.sites))[sent], site[sent], rows)
        self._post("/v1/batches", BATCH_CONTENT_TYPE, body)
        self.seq += 1

    def send_maps(self, steps: Sequence[int], sites: Sequence[Site], *, fault: bool = True) -> None:
        """Tile maps of sites at steps."""
        rng = np.random.default_rng(7)
        maps = [make_tile_map(site, step, rng, fault=fault) for step in steps for site in sites]
        self._post(
            "/v1/tile-maps",
            TILE_MAPS_CONTENT_TYPE,
            encode_tile_maps(self.run_id, self.session, self.rank, self.map_seq, maps),
        )
        self.map_seq += 1

    def _post(self, path: str, content_type: str, body: bytes) -> None:
        headers = {"content-type": content_type, "content-encoding": "zstd"}
        self._ok(lambda: self.client.post(path, content=body, headers=headers))

    @staticmethod
    def _ok(send: Callable[[], httpx.Response]) -> None:
        """As a real agent: a 503 of a slow disk is not the end."""
        until = time.monotonic() + 60
        while (answer := send()).status_code == 503 and time.monotonic() < until:
            time.sleep(0.2)
        assert answer.status_code == 200, answer.text

    def site(self, module: str, operand: str = "input", direction: str = "rowwise") -> Site:
        """A site by name."""
        return next(s for s in self.sites if (s.module, s.operand, s.direction) == (module, operand, direction))


def add_incident(engine: sa.Engine, run_id: str, incident_id: str, **values: Any) -> str:
    """An incident as the fold writes it: Inf laundering at the fault's place, unless told otherwise."""
    now = time.time()
    row: dict[str, Any] = {
        "run_id": run_id, "tenant": "default", "id": incident_id, "attempt": 1, "mode": "inf-laundering",
        "title": f"One Inf in the input of {FAULT_MODULE} was stored as 448", "severity": "critical", "status": "open",
        "verdict": "fp8", "first_step": FAULT_STEP, "last_step": FAULT_STEP, "num_events": 2, "origin": True,
        "place": {
            "ranks": [0], "module": FAULT_MODULE, "gemm": "fprop", "operand": "input", "direction": "rowwise",
            "tile": list(FAULT_TILE), "element": [FAULT_TILE[0], FAULT_TILE[1] * 128 + 17],
        },
        "sites": [FAULT_SITE, site_id(FAULT_MODULE, "input", "columnwise")], "num_sites": 2,
        "evidence": [
            {"field": "num_inf", "value": 1, "baseline": 0, "unit": "elements", "since_step": FAULT_STEP},
            {"field": "amax_max", "value": float("inf"), "baseline": 9.2, "unit": "x", "since_step": FAULT_STEP},
            {"field": "tile_sqnr_db", "value": 26.3, "baseline": 31.6, "unit": "dB", "since_step": FAULT_STEP},
        ],
        "cause": "An Inf reached the quantiser. Blockwise scaling sets the scale of its tile to 1 and stores `448`: "
        "the 127 neighbours were quantised unscaled, the loss stayed finite, and nothing downstream saw an Inf.",
        "fix": [
            {"kind": "code", "text": "Clip or mask the input of `down_proj` before the GEMM; find what makes the Inf."},
            {"kind": "env", "text": "FP8_QUANT_FWD_INP_AMAX_EPS=1e-12"},
            {"kind": "data", "text": "Look at the batch of step 90: one token is enough."},
        ],
        "alternatives": [
            {"mode": "nan-in-activation", "check": "Is the output of the norm before it finite?"},
            {"mode": "kernel-output-fault", "check": "Are the operands of the GEMM before it finite?"},
        ],
        "fingerprint": incident_id, "opened_at": now - 45, "resolved_at": None, "updated_at": now - 45,
    }  # fmt: skip
    row |= values
    row.setdefault("cause_id", cause_id(row["mode"], row["place"]))
    with writing(engine, turn_s=10) as conn:
        conn.execute(sa.insert(schema.incident), [row])
        event = {"run_id": run_id, "tenant": "default", "incident_id": incident_id, "seq": 1, "kind": "opened"}
        conn.execute(
            sa.insert(schema.incident_event), [{**event, "at": now - 45, "step": row["first_step"], "detail": {}}]
        )
    return incident_id


INCIDENT_ID = "0" * 31 + "1"
HOSTILE_ID = "0" * 31 + "2"
HOSTILE = "<script>alert('name')</script><img src=x onerror=alert(1)>"


def faulty_run(client: httpx.Client, engine: sa.Engine, num_steps: int = 120) -> Run:
    """The run with one Inf at FAULT_STEP, its tile maps and its incident."""
    run = Run(client, "demo-inf", "tiny-lm blockwise").register()
    for first in range(0, num_steps, 20):
        run.send(range(first, min(first + 20, num_steps)))
    down = [run.site(FAULT_MODULE, o, d) for o, d, _ in OPERANDS]
    run.send_maps(range(FAULT_STEP - 6, FAULT_STEP + 5), down)
    add_incident(engine, run.run_id, INCIDENT_ID)
    runs_on(engine, run.run_id)
    return run


def runs_on(engine: sa.Engine, run_id: str) -> None:
    """The run is running for as long as tests look at it, however busy the machine is."""
    with writing(engine, turn_s=10) as conn:
        later = {"last_seen_at": time.time() + 3600}
        conn.execute(sa.update(schema.run).where(schema.run.c.run_id == run_id).values(**later))


def nonfinite_run(client: httpx.Client) -> Run:
    """Loss, gradient norm and amax that are NaN, +Inf and −Inf in turn."""
    run = Run(client, "demo-nan", "nan-everywhere", sites=make_sites(1), session="b" * 32).register()

    def spoil(steps: np.ndarray[Any, Any], rows: np.ndarray[Any, Any]) -> None:
        steps["loss"][[10, 11, 12]] = (np.nan, np.inf, -np.inf)
        steps["grad_norm"][[13, 14]] = (np.inf, np.nan)
        of_first = np.arange(len(steps)) * len(run.sites)
        rows["amax_max"][of_first[[10, 11, 12]]] = (np.nan, np.inf, -np.inf)
        steps["loss"][-1] = np.nan

    run.send(range(30), fault=False, change=spoil, ended=True)
    return run


def hostile_run(client: httpx.Client, engine: sa.Engine) -> Run:
    """Names that want to be markup, and names that never end."""
    sites = make_sites(1, prefix=HOSTILE + "/" + "x" * 400)
    run = Run(client, HOSTILE.replace("/", "~"), HOSTILE + "y" * 3000, sites=sites, session="c" * 32).register()
    run.send(range(12), fault=False)
    s = sites[0]
    run.send_maps([11], [s])
    place = {
        "ranks": [0],
        "module": s.module,
        "gemm": "fprop",
        "operand": HOSTILE,
        "direction": "rowwise",
        "tile": [1, 1],
    }
    add_incident(
        engine, run.run_id, HOSTILE_ID, title=HOSTILE + "z" * 5000, first_step=11, last_step=11, place=place,
        sites=[s.id], cause=HOSTILE, fix=[{"kind": "code", "text": f"`{HOSTILE}`"}, {"kind": "env", "text": HOSTILE}],
        alternatives=[{"mode": HOSTILE, "check": f"[x](javascript:alert(1)) {HOSTILE}"}], mode="inf-laundering",
    )  # fmt: skip
    return run


SPARSE_ID = "0" * 31 + "3"
SPARSE_FULL = (0, 1, 2, 3, 4, 48)
SPARSE_SPIKE = 30
SPARSE_MODULE = "layers.0.mlp.down_proj"


def sparse_run(client: httpx.Client, engine: sa.Engine) -> Run:
    """Statistics on each 48th step, and of one broken site at step 30; neither gradient norm nor learning rate."""
    run = Run(client, "sparse", "sparse run", sites=make_sites(1), session="e" * 32).register()
    broken = run.site(SPARSE_MODULE)

    def spoil(steps: np.ndarray[Any, Any], rows: np.ndarray[Any, Any]) -> None:
        steps["present"] = 1
        rows["num_inf"][SPARSE_SPIKE * len(run.sites) + run.sites.index(broken)] = 7

    run.send(range(58), change=spoil, keep=lambda t, s: t in SPARSE_FULL or (t == SPARSE_SPIKE and s is broken))
    place = {"ranks": [0], "module": broken.module, "gemm": "fprop", "operand": "input", "direction": "rowwise"}
    fix = f"Find what computes the input of {broken.module}, and clip it before the cast: x.clamp(-3e4, 3e4)."
    add_incident(
        engine, run.run_id, SPARSE_ID, first_step=SPARSE_SPIKE, last_step=SPARSE_SPIKE, sites=[broken.id],
        place={**place, "tile": None, "element": None}, fix=[{"kind": "code", "text": fix}],
    )  # fmt: skip
    return run


def empty_run(client: httpx.Client) -> Run:
    """Registered, and never heard of again."""
    return Run(client, "demo-empty", "no steps", sites=[], session="d" * 32).register()
