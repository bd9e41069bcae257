"""Processes that share a model. A group of them stays until its process ends."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch
from torch import nn
from training_loops import adamw, lm, loop, text
from training_registry import BOTH, THREE, scenario
from training_run import Run


@contextlib.contextmanager
def group(run: Run, backend: str, world: int = 1) -> Iterator[None]:
    """A process group, which stays until the process ends."""
    import torch.distributed as dist

    rank = int(os.environ.get("TRAINING_RANK", "0"))
    if not dist.is_initialized():
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": "0"}
        if run.cuda:
            torch.cuda.set_device(0)
        store = dist.FileStore(os.environ["TRAINING_STORE"], world)
        dist.init_process_group(backend if run.cuda else "gloo", store=store, rank=rank, world_size=world)
    yield
    dist.barrier()


@scenario(THREE, apart=True)
def ddp_nccl(run: Run) -> None:
    """DistributedDataParallel over NCCL, one process."""
    with group(run, "nccl"):
        model = lm(run, torch.bfloat16)
        called = nn.parallel.DistributedDataParallel(model, device_ids=[0] if run.cuda else None)
        run.keep(model)
        run.attach(called, keep=False)
        loop(run, called, adamw(model))


@scenario(BOTH, world=2, weight=3, apart=True)
def ddp_two(run: Run) -> None:
    """DistributedDataParallel over gloo, two processes on one device, other data in each."""
    with group(run, "gloo", 2):
        model = lm(run, torch.bfloat16)
        called = nn.parallel.DistributedDataParallel(model, device_ids=[0] if run.cuda else None)
        run.keep(model)
        run.attach(called, keep=False)
        rank = int(os.environ.get("TRAINING_RANK", "0"))
        loop(run, called, adamw(model), text(run, 2 * run.num_steps)[rank::2])


def _sharded(run: Run, *, attach_first: bool) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    with group(run, "nccl"):
        mesh = init_device_mesh(run.device, (1,))
        model = lm(run)
        if attach_first:
            run.attach(model)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        if not attach_first:
            run.attach(model)
        optimizer, data = adamw(model), text(run)
        for i in run.each():
            loss = model(*data[i])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            run.loss(loss)
            optimizer.step()
            optimizer.zero_grad()


@scenario(THREE, weight=2, apart=True)
def fsdp2(run: Run) -> None:
    """`fully_shard` with mixed precision, attached behind it."""
    _sharded(run, attach_first=False)


@scenario(weight=2, apart=True)
def fsdp2_attached_before(run: Run) -> None:
    """The same, attached before."""
    _sharded(run, attach_first=True)


@scenario(THREE, cuda=True, weight=2, apart=True)
def fsdp1(run: Run) -> None:
    """FullyShardedDataParallel with its original parameters."""
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

    with group(run, "nccl"):
        policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = FullyShardedDataParallel(lm(run), mixed_precision=policy, use_orig_params=True, device_id=0)
        run.attach(model, keep=False)
        loop(run, model, adamw(model))
