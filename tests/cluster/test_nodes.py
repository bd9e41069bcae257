"""A cluster of three nodes: killed, cut off, out of disk. What was accepted is committed, once."""

from __future__ import annotations

import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

pytest.importorskip("nats", reason="pip install 'fp8watch[nats]'")

from cluster.kit import QUEUE_BYTES, arrivals, eventually, worker_process, working
from cluster.nats_servers import TMPFS, Cluster
from collector.killing import Crew, Store, serve
from collector.kit import Agent, Serving, make_site
from support.counts import part_of

MIB = 1 << 20
RESTS_ON = "server/fp8watch_server/queue", "server/fp8watch_server/worker", "server/fp8watch_server/ingest"


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    made = Store(database_url)
    yield made
    made.close()


@pytest.fixture
def cluster(folder: Path) -> Iterator[Cluster]:
    with Cluster(folder) as made:
        yield made


def env_of(cluster: Cluster, replicas: int = 3, queue_bytes: int = QUEUE_BYTES) -> dict[str, str]:
    given = {"FP8WATCH_QUEUE": cluster.url, "FP8WATCH_QUEUE_REPLICAS": str(replicas)}
    return {**given, "FP8WATCH_QUEUE_BYTES": str(queue_bytes)}


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=5, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


class Scene:
    """Senders, a collector, workers and nodes, each of which can be killed."""

    def __init__(self, tmp_path: Path, database_url: str, cluster: Cluster, num_workers: int) -> None:
        self._tmp_path, self._database_url, self.cluster = tmp_path, database_url, cluster
        self.front: Serving | None = None
        self.url = ""
        self.workers: list[Serving | None] = [None] * num_workers
        self.restart_front()
        for i in range(num_workers):
            self.restart_worker(i)

    def restart_front(self) -> None:
        self.url = ""
        if self.front is not None:
            self.front.kill()
        self.front = serve(self._tmp_path, self._database_url, **env_of(self.cluster))
        eventually(lambda: self.front is not None and is_ready(self.front.url), 60)
        self.url = self.front.url

    def restart_worker(self, i: int) -> None:
        worker = self.workers[i]
        if worker is not None:
            worker.kill()
        self.workers[i] = worker_process(self._tmp_path, self._database_url, **env_of_worker(self.cluster))

    def stop(self) -> None:
        for serving in (self.front, *self.workers):
            if serving is not None:
                serving.kill()


def env_of_worker(cluster: Cluster) -> dict[str, str]:
    env = env_of(cluster)
    return {"queue": env.pop("FP8WATCH_QUEUE"), **env}


def check(store: Store, crew: Crew) -> int:
    """Wait until everything that was accepted is stored; then nothing is lost, invented or counted twice, and each rank's in order."""
    acked = {(s.run, s.number, seq) for s in crew.senders for seq in s.acked}
    eventually(lambda: acked <= store.keys(), 90, lambda: f"{len(acked - store.keys())} of {len(acked)} are missing")
    store.check(crew.senders)
    by_rank: dict[tuple[str, int], list[int]] = {}
    for run, rank, seq in arrivals(store.engine):
        by_rank.setdefault((run, rank), []).append(seq)
    assert all(seqs == sorted(seqs) for seqs in by_rank.values())
    return len(acked)


@pytest.mark.heavy(40, *RESTS_ON)
@pytest.mark.timeout(900)
def test_kill_9_of_nodes_collectors_and_workers_under_load(
    tmp_path: Path, database_url: str, store: Store, cluster: Cluster
) -> None:
    rng = random.Random(5)
    scene = Scene(tmp_path, database_url, cluster, 2)
    killed: dict[str, int] = {}
    try:
        with Crew(6, 2, lambda number: scene.url) as crew:
            for _ in range(part_of(24)):
                crew.wait_for_acks(6, 90)
                time.sleep(rng.uniform(0, 0.1))
                kind = rng.choice(["node", "node", "front", "worker"])
                killed[kind] = killed.get(kind, 0) + 1
                if kind == "front":
                    scene.restart_front()
                elif kind == "worker":
                    scene.restart_worker(rng.randrange(2))
                else:
                    node = rng.choice(cluster.nodes)
                    node.kill()
                    time.sleep(rng.uniform(0, 1))
                    node.start()
            crew.wait_for_acks(6, 90)
        print(killed, check(store, crew), "accepted")
    finally:
        scene.stop()


@pytest.mark.heavy(40, *RESTS_ON)
@pytest.mark.timeout(900)
def test_each_node_is_cut_off_under_load(tmp_path: Path, database_url: str, store: Store, cluster: Cluster) -> None:
    """The leader of the stream is among them. While one is cut off, the others accept; so does the collector at its next try."""
    scene = Scene(tmp_path, database_url, cluster, 1)
    try:
        with Crew(6, 2, lambda number: scene.url) as crew:
            for number in range(3):
                crew.wait_for_acks(6, 90)
                cluster.isolate(number)
                time.sleep(2)
                while crew.acks.acquire(blocking=False):
                    pass
                crew.wait_for_acks(12, 120)
                cluster.mend()
            crew.wait_for_acks(6, 90)
        assert any(s.statuses.get(503) for s in crew.senders), "no cut bit"
        print(check(store, crew), "accepted")
    finally:
        scene.stop()


@pytest.mark.heavy(30, *RESTS_ON)
@pytest.mark.timeout(600)
def test_disks_that_fill_up_refuse_and_keep_what_was_accepted(
    tmp_path: Path, database_url: str, store: Store, folder: Path
) -> None:
    """The file systems of all three nodes are full before the streams are; then there is room again, and workers."""
    if shutil.which("unshare") is None or not _namespaces_work(tmp_path):
        pytest.skip("needs user namespaces: unshare -Urm")
    engine = store.engine
    with Cluster(folder, disk=(16 * MIB, 10 * MIB), max_store="100MB") as cluster:
        front = serve(tmp_path, database_url, **env_of(cluster, queue_bytes=80 * MIB))
        try:
            eventually(lambda: is_ready(front.url), 60)
            sites, rng = [make_site(f"m{i}", order=i) for i in range(100)], np.random.default_rng(1)
            names = ("amax_max", "signal_energy", "noise_energy", "moment2", "moment4", "tile_noise_ratio_sum")
            accepted: set[int] = set()
            with httpx.Client(base_url=front.url, timeout=20, trust_env=False) as client:
                agent = Agent(client, run="run-1").register(sites)
                agent.patient = False
                unsure: list[bytes] = []
                for n in range(1000):
                    noise = {name: rng.random(6400) for name in names}
                    body = agent.body(sites, list(range(64 * n, 64 * n + 64)), fields=noise)
                    if agent.post(body).status_code == 200:
                        accepted.add(agent.seq)
                    else:
                        unsure.append(body)
                    if len(unsure) > 5:
                        break
                assert len(unsure) > 5, "the disks never filled"
                assert accepted
                for node in cluster.nodes:
                    node.make_room()
                    node.kill()
                for node in cluster.nodes:
                    node.wait()
                eventually(lambda: is_ready(front.url), 90)
                with working(database_url, cluster.url, 3, 80 * MIB):
                    eventually(lambda: accepted <= {seq for _, _, seq in arrivals(engine)}, 90)
                    eventually(lambda: agent.post(unsure[-1]).status_code == 200, 60)
                    eventually(lambda: agent.seq in {seq for _, _, seq in arrivals(engine)}, 60)
        finally:
            front.kill()
    stored = arrivals(engine)
    assert len(stored) == len(set(stored))
    print(f"{len(accepted)} accepted with 6 MiB of room on each disk, {len(unsure)} refused")


def _namespaces_work(folder: Path) -> bool:
    script = TMPFS.split(" && head")[0]
    command = ["unshare", "-Urm", "sh", "-c", script, str(folder), "1048576"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0
