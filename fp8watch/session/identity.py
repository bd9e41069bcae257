"""Which run, session and rank this process is: as given, from the environment, else through torch.distributed's store.

No collective is issued: rank 0 publishes one id in the key-value store that every process group has.
"""

from __future__ import annotations

import os
import re
import uuid
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

STORE_KEY = "fp8watch/run_id"
STORE_TIMEOUT_S = 30
_ALLOWED = re.compile(r"[A-Za-z0-9._:@+-]{1,128}")
_RULE = "must be 1 to 128 letters, digits or . _ : @ + -"


@dataclass(frozen=True)
class Identity:
    """Where a run's name comes from is said in the line that attach prints."""

    run_id: str
    source: str
    rank: int
    world_size: int


def _rank(environ: Mapping[str, str]) -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    for rank, world in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")):
        if environ.get(rank, "").isdigit() and environ.get(world, "").isdigit():
            return int(environ[rank]), int(environ[world])
    return 0, 1


def _shared_through_store(rank: int) -> str | None:
    """One id for all ranks of an initialised process group; None where there is none, or it does not answer."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    try:
        from torch.distributed.distributed_c10d import _get_default_store

        store = _get_default_store()
        if rank == 0:
            return bytes(store.compare_set(STORE_KEY, "", uuid.uuid4().hex)).decode()
        store.wait([STORE_KEY], timedelta(seconds=STORE_TIMEOUT_S))
        return bytes(store.get(STORE_KEY)).decode()
    except Exception as e:  # noqa: BLE001  a store that fails costs the common name, never the training
        warnings.warn(
            f"fp8watch: torch.distributed's store did not give a run id ({e}); set FP8WATCH_RUN", stacklevel=3
        )
        return None


def identify(environ: Mapping[str, str] | None = None, *, run_id: str | None = None) -> Identity:
    """Run id as given, from FP8WATCH_RUN, TORCHELASTIC_RUN_ID, SLURM_JOB_ID, the process group's store, else a local UUID.

    Raises:
        ValueError: `run_id` or FP8WATCH_RUN holds characters that no address can carry.
    """
    env = os.environ if environ is None else environ
    rank, world_size = _rank(env)
    if run_id is not None:
        if not isinstance(run_id, str) or not _ALLOWED.fullmatch(run_id):
            raise ValueError(f"run_id={run_id!r}: {_RULE}; give the one of a checkpoint's watch.state_dict()")
        return Identity(run_id, "as given", rank, world_size)
    for variable in ("FP8WATCH_RUN", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"):
        value = env.get(variable, "")
        if not value or (variable == "TORCHELASTIC_RUN_ID" and value == "none"):
            continue
        if not _ALLOWED.fullmatch(value):
            if variable == "FP8WATCH_RUN":
                raise ValueError(f"FP8WATCH_RUN={value!r}: {_RULE}; a name for people goes into attach(run=...)")
            continue
        return Identity(value, variable, rank, world_size)
    shared = _shared_through_store(rank)
    if shared is not None:
        return Identity(shared, "torch.distributed", rank, world_size)
    if world_size > 1:
        warnings.warn(
            f"fp8watch: {world_size} ranks without a common run id, each shows as a run of its own; set FP8WATCH_RUN, "
            "or call attach after init_process_group",
            stacklevel=3,
        )
    return Identity(uuid.uuid4().hex[:12], "local", rank, world_size)
