"""Data parallelism on two processes over gloo. For GPUs, change the two lines with a comment that says so.

    torchrun --nproc-per-node 2 examples/ddp.py

Every rank sends its own statistics, without a collective. The collector compares replicas: a weight that differs on one
rank is reported with that rank.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fp8watch


def main() -> None:
    """Train on this rank's share of the data and print its loss."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    num_steps = parser.parse_args().steps
    dist.init_process_group("gloo")  # GPUs: "nccl"
    rank, device = dist.get_rank(), torch.device("cpu")  # GPUs: torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.set_num_threads(1)
    torch.manual_seed(0)  # the same weights on each rank; DDP broadcasts them anyway
    model = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128)).to(device)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(rank)).to(device)  # each rank has data of its own
    target = x.roll(1, dims=1)

    # After init_process_group: ranks without a common id from the launcher then agree on one in the group's store.
    with fp8watch.attach(ddp, run="ddp") as watch:
        for step in range(num_steps):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(ddp(x), target)
            loss.backward()
            watch.log(loss=loss)
            optimizer.step()
            if step % 5 == 0 or step == num_steps - 1:
                print(f"rank {rank} step {step} loss {loss.item():.4f}")
        print(f"rank {rank} run {watch.identity.run_id}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
