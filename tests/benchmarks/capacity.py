"""A model on paper of what a fleet takes: cores, bytes, disk and money, out of costs that were measured.

All inputs stand in one table, each with where it was measured or that it is assumed; the model is a page of sums. Its error is
that of its sums for the largest real run. `python -m benchmarks.capacity` writes the section of docs/scale.md.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

from benchmarks.table import table

PAGE = Path(__file__).parents[2] / "docs" / "scale.md"
MARK = "capacity"
DAY_S, MONTH_DAYS, MONTH_H = 86_400, 30, 730
GB = 1e9


@dataclass(frozen=True)
class Input:
    """A number, and where it comes from."""

    value: float
    unit: str
    source: str


FLEET = "`benchmarks.fleet --ranks 1000 --interval 20 --batches 3`"
STORE = "`benchmarks.store`, PostgreSQL"
INPUTS = {
    "collector": Input(4.38, "CPU ms a batch of 160 records, detection in it", FLEET),
    "worker": Input(1.52, "CPU ms a batch", FLEET),
    "NATS": Input(0.25, "CPU ms a batch, one server", FLEET),
    "NATS of three": Input(1.83 / 0.35, "times one server's", "`benchmarks.queued`"),
    "PostgreSQL": Input(0.77, "CPU ms a batch", FLEET),
    "further record, collector": Input(
        1.38, "CPU µs: two decodings and the detectors", "batches of 160 and 1,120 records"
    ),
    "further record, worker and PostgreSQL": Input(1.30, "CPU µs", f"{STORE}: ingest"),
    "compaction": Input(3.65, "CPU µs a record", f"{STORE}: ingest and compaction"),
    "registration": Input(4.3, "CPU ms a rank behind a relay, collector and PostgreSQL", FLEET),
    "batch on the wire": Input(8_352, "bytes, of 160 records and 8 steps", FLEET),
    "further record on the wire": Input(40.8, "bytes", "batches of 160 and 1,120 records"),
    "record in the store": Input(38.7, "bytes for a day", STORE),
    "site and step, merged over ranks": Input(45.2, "bytes, after that", f"{STORE}: 11.3 a record of four ranks"),
    "scalars of a rank's step": Input(
        246, "bytes with their indexes, for a day; one rank's of each step for good", "`benchmarks.fleet --ranks 10000`"
    ),
    "memory of a collector": Input(0.27, "MiB a rank that it detects for, pages open", f"{FLEET}, beside 10,000 ranks"),
    "sites of a rank": Input(560, "", "assumed"),
    "step": Input(4, "s", "assumed"),
    "batch every": Input(8, "s", "agents: eight steps, or those of eight seconds"),
    "records of a site in 16 steps": Input(2, "", "agents of 256 ranks and more"),
    "use of a core": Input(0.5, "of it, at most", "assumed"),
    "core": Input(0.05, "USD an hour", "assumed"),
    "disk": Input(0.10, "USD a GB and month", "assumed"),
    "GPU": Input(2.00, "USD an hour", "assumed, to compare with"),
}
MEASURED_RECORDS = 160
FLEETS = (1_000, 10_000, 100_000)


def of(name: str) -> float:
    """An input."""
    return INPUTS[name].value


def cpu_ms(num_records: float, num_nodes: int = 3) -> dict[str, float]:
    """CPU milliseconds of a batch by part, compaction by itself."""
    more = num_records - MEASURED_RECORDS
    nats = of("NATS") * (of("NATS of three") if num_nodes == 3 else 1.0)
    return {
        "collectors": of("collector") + more * of("further record, collector") / 1e3,
        "NATS": nats,
        "workers and PostgreSQL": of("worker")
        + of("PostgreSQL")
        + more * of("further record, worker and PostgreSQL") / 1e3,
        "compaction": num_records * of("compaction") / 1e3,
    }


def of_fleet(num_gpus: int) -> dict[str, float]:
    """What a fleet takes."""
    steps = of("batch every") / of("step")
    num_records = of("sites of a rank") * steps * of("records of a site in 16 steps") / 16
    batches_s = num_gpus / of("batch every")
    cores = {part: batches_s * ms / 1e3 for part, ms in cpu_ms(num_records).items()}
    batch_bytes = of("batch on the wire") + (num_records - MEASURED_RECORDS) * of("further record on the wire")
    day_steps = DAY_S / of("step")
    detail = batches_s * DAY_S * num_records * of("record in the store")
    merged = day_steps * of("sites of a rank") * of("site and step, merged over ranks") * MONTH_DAYS
    scalars = day_steps * of("scalars of a rank's step")
    stored = detail + merged + scalars * (num_gpus + MONTH_DAYS)
    bought = sum(cores.values()) / of("use of a core")
    usd = bought * of("core") * MONTH_H + stored / GB * of("disk")
    return {
        "batches a second": batches_s,
        **{f"cores: {part}": n for part, n in cores.items()},
        "cores together": sum(cores.values()),
        "cores to have": bought,
        "memory of collectors, GiB": num_gpus * of("memory of a collector") / 1024,
        "GB a day on the wire": batches_s * DAY_S * batch_bytes / GB,
        "GB stored: a day of every rank": detail / GB,
        "GB stored: a month merged over ranks": merged / GB,
        "GB stored: a day of scalars of every rank": scalars * num_gpus / GB,
        "GB stored: a month of scalars of one rank": scalars * MONTH_DAYS / GB,
        "USD a month": usd,
        "of what the GPUs cost, ‰": usd / (num_gpus * of("GPU") * MONTH_H) * 1e3,
    }


def page(real: str) -> str:
    """The section."""
    fleets = [of_fleet(n) for n in FLEETS]
    rows = [(name, *(_number(f[name]) for f in fleets)) for name in fleets[0]]
    inputs = [(name, _number(i.value), i.unit, i.source) for name, i in INPUTS.items()]
    return "\n\n".join(
        (
            table(("", *(f"{n:,} GPUs" for n in FLEETS)), rows),
            "Inputs:",
            table(("input", "value", "unit", "from"), inputs),
            real,
        )
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def main() -> None:
    """Write the section; what is said below its tables stays."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--print", action="store_true", help="do not write the page")
    args = parser.parse_args()
    text = PAGE.read_text()
    found = re.search(rf"<!-- {MARK} -->\n(.*?)\n<!-- /{MARK} -->", text, re.S)
    assert found is not None, f"{PAGE} has no section {MARK}"
    made = page(found[1].rpartition("|\n\n")[2])
    if args.print:
        print(made)
    else:
        PAGE.write_text(text[: found.start(1)] + made + text[found.end(1) :])


if __name__ == "__main__":
    main()
