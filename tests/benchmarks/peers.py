"""The same sketches into what others keep metrics in: whichever of them is installed takes part, the others are named.

    python -m benchmarks.peers --python /venv-with-mlflow-and-trackio/bin/python --path /folder/with/binaries

MLflow and trackio are called in their own process, without HTTP; Prometheus and VictoriaMetrics get remote write with
everything encoded beforehand. What a client would pay is left out of all of them, and so are histogram buckets that are
zero. CPU seconds are those of the process that stores; bytes are on the disk, after each has tidied up.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks import store, table
from fp8watch_agent.record import FIELDS, HISTOGRAMS
from fp8watch_server.load.model import traits_of
from fp8watch_server.load.stream import LoadPlan, RankStream
from fp8watch_server.store import commit
from fp8watch_server.store.compactor import Compactor

SCALARS = tuple(f.name for f in FIELDS if f.size == 1)
STEPS_A_WRITE = 16
NAMES = ("prometheus", "victoria-metrics", "mlflow", "trackio")
CHILD = Path(__file__).parent / "peers_child.py"


@dataclass(frozen=True)
class Measured:
    """What one of them took."""

    what: str
    num_records: int
    cpu_s: float
    num_bytes: int

    @property
    def per_cpu_s(self) -> float:
        """Records."""
        return self.num_records / self.cpu_s


def metrics_of(plan: LoadPlan) -> list[dict[str, float]]:
    """Each step as names and numbers: every scalar field, and every bucket that is not zero."""
    stream = RankStream(plan, traits=traits_of(plan.sites, plan.seed))
    names = [f"{s.module}/{s.operand}/{s.direction}" for s in plan.sites]
    out = []
    for step in range(plan.num_steps):
        rows, values = stream.rows(step), {}
        for site, row in zip(names, rows, strict=True):
            values.update({f"{site}/{field}": float(row[field]) for field in SCALARS})
            for histogram in HISTOGRAMS:
                counts = row[histogram]
                values.update({f"{site}/{histogram}_{b}": float(counts[b]) for b in counts.nonzero()[0].tolist()})
        out.append(values)
    return out


# ---- remote write: protobuf and snappy by hand, made before the clock runs


def _varint(n: int) -> bytes:
    out = bytearray()
    while n > 0x7F:
        out.append(n & 0x7F | 0x80)
        n >>= 7
    return bytes([*out, n])


def _field(number: int, raw: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(raw)) + raw


def _label(name: str, value: str) -> bytes:
    return _field(1, _field(1, name.encode()) + _field(2, value.encode()))


def _snappy(raw: bytes) -> bytes:
    """Literals only: valid, and the cheapest there is to read."""
    out = [_varint(len(raw))]
    for at in range(0, len(raw), 1 << 16):
        piece = raw[at : at + (1 << 16)]
        out += [b"\xf4", (len(piece) - 1).to_bytes(2, "little"), piece]
    return b"".join(out)


def writes(steps: list[dict[str, float]], began_s: float) -> Iterator[bytes]:
    """Requests of STEPS_A_WRITE steps: a series for each site and field, a sample for each step."""
    heads: dict[str, bytes] = {}
    for at in range(0, len(steps), STEPS_A_WRITE):
        series: dict[str, list[bytes]] = {}
        for i, values in enumerate(steps[at : at + STEPS_A_WRITE]):
            when = _varint(2 << 3) + _varint(int((began_s + at + i) * 1000))
            for key, value in values.items():
                sample = _varint(1 << 3 | 1) + struct.pack("<d", value) + when
                series.setdefault(key, []).append(_field(2, sample))
        body = []
        for key, samples in series.items():
            if key not in heads:
                site, _, field = key.rpartition("/")
                heads[key] = _label("__name__", f"fp8_{field}") + _label("run", "bench") + _label("site", site)
            body.append(_field(1, heads[key] + b"".join(samples)))
        yield _snappy(b"".join(body))


@contextmanager
def started(command: list[str], port: int, folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
        try:
            until = time.monotonic() + 20
            while time.monotonic() < until and process.poll() is None:
                with closing(socket.socket()) as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.1)
            yield process, f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(20)


def _free_port() -> int:
    with closing(socket.socket()) as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def remote_write(binary: str, what: str, steps: list[dict[str, float]], num_records: int) -> Measured:
    """Prometheus or VictoriaMetrics."""
    prometheus = what == "prometheus"
    with tempfile.TemporaryDirectory(prefix="fp8peer-") as name:
        folder, port = Path(name), _free_port()
        if prometheus:
            (folder / "prometheus.yml").write_text("global: {scrape_interval: 1h}\n")
            command = [binary, "--config.file=prometheus.yml", "--storage.tsdb.path=data", "--web.enable-admin-api"]
            command += [f"--web.listen-address=127.0.0.1:{port}", "--web.enable-remote-write-receiver"]
        else:
            command = [binary, "-storageDataPath=data", f"-httpListenAddr=127.0.0.1:{port}", "-retentionPeriod=10y"]
            command += ["-memory.allowedPercent=20"]
        bodies = list(writes(steps, time.time() - len(steps) - 60))
        headers = {"Content-Encoding": "snappy", "Content-Type": "application/x-protobuf"}
        headers["X-Prometheus-Remote-Write-Version"] = "0.1.0"
        with started(command, port, folder) as (process, url), httpx.Client(base_url=url, timeout=120) as client:
            time.sleep(1)
            before = _cpu_s(process.pid)
            for body in bodies:
                answer = client.post("/api/v1/write", content=body, headers=headers)
                assert answer.status_code in (200, 204), answer.text
            if prometheus:  # what is in memory becomes a block, as it would within two hours
                snapshot = client.post("/api/v1/admin/tsdb/snapshot").json()["data"]["name"]
                size = _bytes(folder / "data" / "snapshots" / snapshot)
            else:
                client.get("/internal/force_flush").raise_for_status()
                time.sleep(2)
                client.get("/internal/force_merge").raise_for_status()
                time.sleep(3)
                size = _bytes(folder / "data")
            return Measured(what, num_records, _cpu_s(process.pid) - before, size)


def library(python: str, what: str, steps: list[dict[str, float]], num_sites: int) -> Measured:
    """MLflow or trackio."""
    with tempfile.TemporaryDirectory(prefix="fp8peer-") as name:
        folder = Path(name)
        (folder / "data.json").write_text(json.dumps(steps))
        (folder / "kept").mkdir()
        command = [python, str(CHILD), what, str(folder / "data.json"), str(folder / "kept")]
        env = {**os.environ, "PYTHONPATH": "", "MLFLOW_DISABLE_TELEMETRY": "true", "HF_HUB_OFFLINE": "1"}
        out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=env, cwd=folder).stdout
        got = json.loads(out.splitlines()[-1])
        return Measured(what, len(steps) * num_sites, got["cpu_s"], got["bytes"])


def ours(plan: LoadPlan) -> list[Measured]:
    """Ingest alone, and with compaction, on both databases: what benchmarks.store measures."""
    with store.databases(["sqlite", "postgresql"]) as made:
        return [m for database in made for m in _ours(database, plan)]


def _ours(database: store.Database, plan: LoadPlan) -> list[Measured]:
    streams = store.register(database.engine, plan, plan.sites)
    known, empty = commit.KnownSites(), database.bytes()
    groups = list(store.groups(plan, streams))
    n, ingest_s = store.timed(database, lambda: sum(store.ingest(database, bodies, known) for bodies in groups))
    last = Compactor(database.engine, clock=lambda: time.time() + 1e6)
    compact_s = store.timed(database, lambda: last.round().num_records)[1]
    size, name = database.bytes() - empty, f"**fp8watch**, {database.kind}"
    return [
        Measured(f"{name}: ingest", n, ingest_s, size),
        Measured(f"{name}: ingest and compaction", n, ingest_s + compact_s, size),
    ]


def main() -> None:
    """Measure whoever is there, and write the section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="interpreter that has mlflow or trackio")
    parser.add_argument("--path", default=os.environ.get("PATH", ""), help="where prometheus and victoria-metrics are")
    parser.add_argument("--sites", type=int, default=160)
    parser.add_argument("--steps", type=int, default=512)
    parser.add_argument("--few", type=int, default=4, help="steps for those that take a row for each number")
    parser.add_argument("--repetitions", type=int, default=1, help="taken for the sake of the other scripts")
    args = parser.parse_args()
    plan = LoadPlan(num_sites=args.sites, num_steps=args.steps, steps_per_batch=STEPS_A_WRITE, run="bench")
    steps = metrics_of(plan)
    got, missing, versions = ours(plan), [], []
    for what in NAMES:
        if what in ("mlflow", "trackio"):
            asked = [args.python, "-c", f"import importlib.metadata as m; print(m.version({what!r}))"]
            found = subprocess.run(asked, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            if found.returncode:
                missing.append(what)
                continue
            versions.append(f"{what} {found.stdout.strip()}")
            few = steps[: args.few] if what == "mlflow" else steps[: 16 * args.few]
            got.append(library(args.python, what, few, args.sites))
            continue
        binary = shutil.which(what, path=args.path) or shutil.which(f"{what}-prod", path=args.path)
        if binary is None:
            missing.append(what)
            continue
        asked = [binary, "--version" if what == "prometheus" else "-version"]
        said = subprocess.run(asked, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True).stdout
        versions.append(f"{what} {next((w for w in said.split() if w[:1].isdigit() or w[:2] == 'v1'), '')}".strip())
        got.append(remote_write(binary, what, steps, len(steps) * args.sites))
    best, both = got[0], got[1]
    rows = [
        (
            m.what,
            f"{m.num_records:,}",
            f"{m.per_cpu_s:,.0f}",
            f"{m.num_bytes / m.num_records:,.1f}",
            ""
            if m.what.startswith("**")
            else f"{best.per_cpu_s / m.per_cpu_s:,.0f}×, {both.per_cpu_s / m.per_cpu_s:,.1f}×",
            ""
            if m.what.startswith("**")
            else f"{best.num_bytes / best.num_records / (m.num_bytes / m.num_records):.2f}",
        )
        for m in got
    ]
    numbers = sum(map(len, steps)) / len(steps) / args.sites
    columns = (
        "",
        "records",
        "records per CPU second",
        "bytes per record",
        "CPU: our ingest, with compaction",
        "our bytes / its",
    )
    text = f"""## Beside others

{table.machine("sqlalchemy", "psycopg")} {", ".join(versions) or "None of the others"}. Not installed: {", ".join(missing) or "none"}.
One rank, {args.sites} sites: a record is {numbers:.0f} numbers where there are no sketches (scalar fields, and the buckets of its
histograms that are not zero). In favour of the others: what is sent is made before the clock runs, MLflow and trackio
are called without HTTP. Ours is decode, check, hash and commit; ratios are to SQLite. Goals: ingest ≥ 50 times Prometheus at
≤ ½ of its bytes; with compaction ≥ 15 times VictoriaMetrics at ≤ 0.6; ingest ≥ 500 times MLflow, ≥ 8 times trackio.

{table.table(columns, rows)}
"""
    table.write("peers", text)


if __name__ == "__main__":
    main()
