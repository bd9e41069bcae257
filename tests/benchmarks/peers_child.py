"""One peer that is a Python library, in an interpreter of its own that has nothing of fp8watch: called by peers.py.

    python peers_child.py mlflow DATA.json FOLDER

DATA.json is a list of steps, each a map of metric names to numbers. Prints seconds of CPU and bytes on the disk.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

Steps = list[dict[str, float]]
AT_ONCE = 1000
"""Metrics that one call of MLflow takes."""


def to_mlflow(steps: Steps, folder: Path) -> Callable[[], None]:
    """Straight into its SQLite store, as its server would, without HTTP: rows of (run, key, step)."""
    from mlflow.entities import Metric
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    store = SqlAlchemyStore(f"sqlite:///{folder}/mlflow.db", str(folder / "artifacts"))
    experiment = store.create_experiment("bench")
    run = store.create_run(experiment, "bench", 0, [], "bench").info.run_id

    def log() -> None:
        for step, values in enumerate(steps):
            metrics = [Metric(key, value, step * 1000, step) for key, value in values.items()]
            for at in range(0, len(metrics), AT_ONCE):
                store.log_batch(run, metrics[at : at + AT_ONCE], [], [])

    return log


def to_trackio(steps: Steps, folder: Path) -> Callable[[], None]:
    """Straight into its SQLite storage, 16 steps a call: a row a step, all metrics as JSON."""
    os.environ["TRACKIO_DIR"] = str(folder)
    from trackio.sqlite_storage import SQLiteStorage

    def log() -> None:
        for at in range(0, len(steps), 16):
            part = steps[at : at + 16]
            SQLiteStorage.bulk_log("bench", "bench", part, steps=list(range(at, at + len(part))))

    return log


def main() -> None:
    """Measure one."""
    name, data, folder = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    steps: Steps = json.loads(data.read_text())
    log = {"mlflow": to_mlflow, "trackio": to_trackio}[name](steps, folder)
    began = time.process_time()
    log()
    spent_s = time.process_time() - began
    num_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(json.dumps({"cpu_s": spent_s, "bytes": num_bytes}))


if __name__ == "__main__":
    main()
