"""Checkpoint and resume: the step number, the run and the delayed scales go on where they were.

python examples/checkpoint_and_resume.py --checkpoint checkpoint.pt    # steps 0 to 14
python examples/checkpoint_and_resume.py --checkpoint checkpoint.pt    # steps 15 to 29 of the same run
"""

import argparse
from pathlib import Path

import torch
from torch import nn

import fp8watch


def main() -> None:
    """Train for some steps, from a checkpoint where there is one, and write the next checkpoint."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint.pt"))
    parser.add_argument("--steps", type=int, default=15, help="steps of this job")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(256, 128)
    target = x.roll(1, dims=1)

    saved = torch.load(args.checkpoint, weights_only=True) if args.checkpoint.exists() else None
    if saved is not None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])

    run_id = None if saved is None else saved["fp8watch"]["run_id"]  # the run goes on
    with fp8watch.attach(model, run="checkpoint and resume", run_id=run_id, recipe="delayed") as watch:
        if saved is not None:
            watch.load_state_dict(saved["fp8watch"])  # step number, delayed scales and their amax histories
        first = 0 if saved is None else saved["step"]
        for step in range(first, first + args.steps):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), target)
            loss.backward()
            watch.log(loss=loss)
            optimizer.step()
            if (step - first) % 5 == 0 or step == first + args.steps - 1:
                print(f"step {step} loss {loss.item():.4f}")
        print(f"run {watch.identity.run_id}: last step {watch.last_step}")
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "step": first + args.steps,
            "fp8watch": watch.state_dict(),
        }
        torch.save(state, args.checkpoint)


if __name__ == "__main__":
    main()
