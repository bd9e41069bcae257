"""The trainings of `trainers.py`, with what the checks of this room train with. As a command: one of them, as a line of JSON.

python tests/stacks/trainer_runs.py NAME URL FOLDER
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

BREAKS_AT = 4
"""Forward passes before the one that reads an Inf."""
ELEMENT = (5, 7)


class Trained:
    """What a training gave: losses of its steps as the trainer tells them, and its model."""

    def __init__(self, losses: list[float], model: nn.Module) -> None:
        self.losses = losses
        self.weights = {k: _plain(v).clone() for k, v in model.state_dict().items() if isinstance(v, torch.Tensor)}

    def same(self, other: Trained) -> bool:
        """To the last bit."""
        return self.losses == other.losses and all(torch.equal(v, other.weights[k]) for k, v in self.weights.items())


def _plain(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found.detach()


def put_inf(module: nn.Linear) -> None:
    """Into one element of its weight."""
    with torch.no_grad():
        _plain(module.weight)[ELEMENT] = float("inf")


def breaks(module: nn.Linear) -> None:
    """Put an Inf into its weight before a forward in training."""
    count = [0]

    def before(linear: nn.Linear, _: Any) -> None:
        count[0] += linear.training
        if count[0] == BREAKS_AT + 1:
            put_inf(linear)

    module.register_forward_pre_hook(before)


Run = Callable[[Path, bool, bool], Trained]
"""(folder, watched, an Inf is put into a weight)"""


def _loop(folder: Path, watched: bool, broken: bool, *, micro: int = 1, wrap: Any = None) -> Trained:
    from attach.conftest import Mlp

    import fp8watch

    torch.manual_seed(0)
    model = Mlp()
    called = model if wrap is None else wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    watch = fp8watch.attach(called, recipe="observe", overhead_budget=None) if watched else None
    generator, losses = torch.Generator().manual_seed(1), []
    for step in range(6):
        if broken and step == BREAKS_AT:
            put_inf(model.down)
        optimizer.zero_grad()
        parts = []
        for _ in range(micro):
            loss = called(torch.randn(32, 64, generator=generator))
            (loss / micro).backward()
            parts.append(float(loss.detach()))
        optimizer.step()
        losses.append(sum(parts) / micro)
    if watch is not None:
        watch.flush(20)
        watch.detach()
    return Trained(losses, model)


def plain(folder: Path, watched: bool, broken: bool) -> Trained:
    """A loop of one's own."""
    return _loop(folder, watched, broken)


def accumulated(folder: Path, watched: bool, broken: bool) -> Trained:
    """With three micro-batches in a step."""
    return _loop(folder, watched, broken, micro=3)


def ddp(folder: Path, watched: bool, broken: bool) -> Trained:
    """One of two ranks, the other a process of its own; both have the same data."""
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    return _loop(folder, watched, broken, wrap=nn.parallel.DistributedDataParallel)


def compiled(folder: Path, watched: bool, broken: bool) -> Trained:
    """torch.compile, traced by AOTAutograd and not lowered further."""
    return _loop(folder, watched, broken, wrap=lambda model: torch.compile(model, backend="aot_eager"))


def transformers(folder: Path, watched: bool, broken: bool) -> Trained:
    """Its Trainer with four micro-batches in a step and a short last window."""
    import check_transformers as room

    from fp8watch.integrations.transformers import Fp8WatchCallback

    model = room.model()
    if broken:
        breaks(model.model.layers[1].mlp.down_proj)
    callback = Fp8WatchCallback(recipe="observe", overhead_budget=None) if watched else None
    trainer = room.trainer(folder / "hf", callback, model=model, save_strategy="no", max_grad_norm=1.0)
    trainer.train()
    return Trained(list(room.logged(trainer, "loss").values()), trainer.model)


def lightning(folder: Path, watched: bool, broken: bool) -> Trained:
    """Its Trainer with accumulation and clipping."""
    import check_lightning as room

    from fp8watch.integrations.lightning import Fp8Watch

    module = room.Automatic()
    if broken:
        breaks(module.net.down)
    callbacks = [Fp8Watch(recipe="observe", overhead_budget=None)] if watched else []
    room.fit(module, folder, *callbacks, accumulate_grad_batches=2, gradient_clip_val=0.1)
    seen = module.seen
    return Trained([sum(seen[i : i + 2]) / 2 for i in range(0, len(seen), 2)], module)


def accelerate(folder: Path, watched: bool, broken: bool) -> Trained:
    """Its loop with accumulation and clipping."""
    import check_accelerate as room

    from fp8watch.integrations.accelerate import Fp8WatchTracker

    if broken:
        _break_when_made(room)
    losses, _, model = room.train(Fp8WatchTracker(recipe="observe", overhead_budget=None) if watched else None, folder)
    return Trained(losses, model)


def deepspeed(folder: Path, watched: bool, broken: bool) -> Trained:
    """Its engine, ZeRO stage 2, bfloat16."""
    import check_deepspeed as room

    from fp8watch.integrations.deepspeed import attach_deepspeed

    if not torch.distributed.is_initialized():
        room.deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        room.deepspeed.init_distributed(dist_backend="gloo")
    engine = room.engine_of(2)
    if broken:
        breaks(engine.module.down)
    watch = attach_deepspeed(engine, recipe="observe", overhead_budget=None) if watched else None
    losses = [loss for loss, _ in room.train(engine, room.batches(6))]
    if watch is not None:
        watch.flush(20)
        watch.detach()
    return Trained(losses, engine.module)


def _titan(family: str, broken_at: str, folder: Path, watched: bool, broken: bool) -> Trained:
    import check_torchtitan as room

    from fp8watch.integrations.torchtitan import attach_torchtitan

    def attach(trainer: Any) -> None:
        if broken:
            breaks(trainer.model_parts[0].get_submodule(broken_at))
        if watched:
            attach_torchtitan(trainer, recipe="observe", overhead_budget=None)

    logged: dict[int, Any] = {}
    try:
        logged, trainer = room.train(family, folder, watched=watched, attach=attach, seen=logged, global_batch_size=4)
    except RuntimeError as error:
        if not broken or "not finite" not in str(error):
            raise
        return Trained([], nn.Module())
    return Trained([loss for loss, *_ in logged.values()], trainer.model_parts[0])


def titan_llama(folder: Path, watched: bool, broken: bool) -> Trained:
    """torchtitan's Llama 3, two micro-batches in a step."""
    return _titan("llama3", "layers.1.feed_forward.w2", folder, watched, broken)


def titan_deepseek(folder: Path, watched: bool, broken: bool) -> Trained:
    """torchtitan's DeepSeek-V3: grouped experts."""
    return _titan("deepseek_v3", "layers.1.attention.wo", folder, watched, broken)


def _break_when_made(room: Any) -> None:
    own = room.Net

    def net() -> nn.Module:
        made: nn.Module = own()
        breaks(made.down)
        return made

    room.Net = net


TRAINERS: dict[str, Run] = {
    "a loop of one's own": plain,
    "the same with accumulation": accumulated,
    "DistributedDataParallel, two ranks": ddp,
    "torch.compile": compiled,
    "Hugging Face Trainer, accumulation": transformers,
    "Lightning, accumulation": lightning,
    "accelerate, accumulation": accelerate,
    "DeepSpeed, ZeRO-2, accumulation": deepspeed,
    "torchtitan, Llama 3": titan_llama,
    "torchtitan, DeepSeek-V3": titan_deepseek,
}


def measure(name: str, url: str, folder: Path) -> dict[str, Any]:
    """One line of the table."""
    from attach.conftest import Kept

    import fp8watch.session.start as start

    run, kept, recorder = TRAINERS[name], [], start.Recorder
    alone = run(folder, False, False)

    def keep(*args: Any, **kwargs: Any) -> Kept:
        kept.append(Kept(*args, **kwargs))
        return kept[-1]

    start.Recorder = keep  # type: ignore[assignment, misc]
    try:
        watched = run(folder, True, False)
    finally:
        start.Recorder = recorder  # type: ignore[misc]
    losses = [float(header["loss"]) for header, *_ in kept[0].steps]
    close = len(losses) == len(watched.losses) and all(
        abs(a - b) < 1e-4 for a, b in zip(losses, watched.losses, strict=True)
    )
    called = re.sub(r"\W+", "-", name.lower())
    os.environ |= {"FP8WATCH_COLLECTOR": url, "FP8WATCH_RUN": called}
    run(folder, True, True)
    return {
        "trainer": name, "loss": close, "identical": watched.same(alone), "steps": len(losses),
        "made": len(watched.losses), "run": called,
    }  # fmt: skip


def second_rank(name: str, url: str, folder: Path) -> int:
    """The other rank of DistributedDataParallel, in a fork that makes the same trainings."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    pid = os.fork()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "RANK": str(int(pid == 0))}
    if pid == 0:
        try:
            measure(name, url, folder)
        finally:
            os._exit(0)
    return pid


def main() -> None:
    """Measure one."""
    name, url, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    torch.set_num_threads(1)
    other = second_rank(name, url, folder) if TRAINERS[name] is ddp else None
    row = measure(name, url, folder)
    if other is not None:
        os.waitpid(other, 0)
    print(json.dumps(row))


if __name__ == "__main__":
    main()
