"""Loops as people write them by hand: precision and optimizers; and what all loops of this room are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from training_models import Lm, tokens
from training_registry import THREE, scenario
from training_run import Run

Step = Callable[[Tensor, Tensor], Tensor]


def lm(run: Run, dtype: torch.dtype = torch.float32, **how: Any) -> Lm:
    """A small decoder on the device."""
    return Lm(run.size(256, 64), run.size(3, 2), **how).to(run.device, dtype)


def text(run: Run, count: int | None = None) -> list[tuple[Tensor, Tensor]]:
    """Batches of it."""
    return tokens(run.device, 4, run.size(256, 32), count or run.num_steps)


def adamw(model: nn.Module, **how: Any) -> torch.optim.Optimizer:
    """As people call it."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, **how)


def loop(
    run: Run, forward: Callable[..., Tensor], optimizer: torch.optim.Optimizer, batches: list[Any] | None = None
) -> None:
    """Forward, backward, step."""
    data = text(run) if batches is None else batches
    for i in run.each():
        loss = forward(*data[i % len(data)])
        loss.backward()
        run.loss(loss)
        optimizer.step()
        optimizer.zero_grad()


def plain(run: Run, model: nn.Module, forward: Callable[..., Tensor] | None = None, **how: Any) -> None:
    """Attach, and train with AdamW."""
    run.attach(model)
    loop(run, model if forward is None else forward, adamw(model, **how))


def autocast(run: Run, model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> Callable[..., Tensor]:
    """Its forward under autocast."""

    def forward(*batch: Tensor) -> Tensor:
        with torch.autocast(run.device, dtype):
            out: Tensor = model(*batch)
        return out

    return forward


# ---- precision


@scenario(("defaults", "observe", "emulated", "current", "delayed", "observe-all"), weight=5)
def lm_bf16(run: Run) -> None:
    """All in bfloat16."""
    plain(run, lm(run, torch.bfloat16))


@scenario(("defaults", "observe", "emulated", "scaled_mm"))
def lm_fp32(run: Run) -> None:
    """All in float32."""
    plain(run, lm(run))


@scenario()
def lm_fp16(run: Run) -> None:
    """All in float16, by SGD."""
    model = lm(run, torch.float16)
    run.attach(model)
    loop(run, model, torch.optim.SGD(model.parameters(), lr=1e-2))


@scenario(("defaults", "observe", "emulated", "delayed", "mxfp8"))
def autocast_bf16(run: Run) -> None:
    """bfloat16 over weights in float32."""
    model = lm(run)
    plain(run, model, autocast(run, model))


@scenario(THREE, steps=20)
def scaler_fp16(run: Run) -> None:
    """float16 with a GradScaler whose first scale overflows: steps are skipped, one more by an Inf in a gradient."""
    model = lm(run)
    run.attach(model)
    optimizer, scaler = adamw(model), torch.amp.GradScaler(run.device, init_scale=2.0**20, growth_interval=5)
    forward, data = autocast(run, model, torch.float16), text(run)
    for i in run.each():
        loss = forward(*data[i])
        scaler.scale(loss).backward()
        if i == 12:
            model.layers[0].mlp.up_proj.weight.grad[0, 0] = float("inf")
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        run.loss(loss)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    run.notes["scale"] = scaler.get_scale()


@scenario(("defaults", "observe"), steps=80, timeout_s=90, weight=3)
def long_run(run: Run) -> None:
    """80 steps: every turn and every hash comes once, and who waits is counted in all of them."""
    plain(run, lm(run, torch.bfloat16), fused=run.cuda)


# ---- optimizers


@scenario()
def adamw_fused(run: Run) -> None:
    """Fused AdamW, with gradient clipping."""
    model = lm(run, torch.bfloat16)
    run.attach(model)
    optimizer, data = adamw(model, fused=True), text(run)
    for i in run.each():
        loss = model(*data[i])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        run.loss(loss)
        optimizer.step()
        optimizer.zero_grad()


@scenario()
def adamw_foreach(run: Run) -> None:
    """foreach AdamW with a schedule."""
    model = lm(run, torch.bfloat16)
    run.attach(model)
    optimizer, data = adamw(model, foreach=True), text(run)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    for i in run.each():
        loss = model(*data[i])
        loss.backward()
        run.loss(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=False)


@scenario(cuda=True)
def adamw_capturable(run: Run) -> None:
    """capturable AdamW with its learning rate in a tensor."""
    model = lm(run, torch.bfloat16)
    run.attach(model)
    rate = torch.tensor(1e-3, device=run.device)
    loop(run, model, torch.optim.AdamW(model.parameters(), lr=rate, capturable=True))


@scenario()
def sgd_accumulated(run: Run) -> None:
    """SGD with momentum over three micro-batches, logged by hand."""
    model = lm(run, torch.bfloat16)
    watch = run.attach(model)
    optimizer, data = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), text(run, 3 * run.num_steps)
    for i in run.each():
        total = torch.zeros((), device=run.device)
        for k in range(3):
            loss = model(*data[3 * i + k]) / 3
            loss.backward()
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        run.loss(total)
        if watch is not None:
            watch.log(loss=total, grad_norm=norm, batch_id=str(i))
        optimizer.step()
        optimizer.zero_grad()


@scenario()
def step_in_backward(run: Run) -> None:
    """An optimizer for each parameter, which steps in backward."""
    model = lm(run, torch.bfloat16)
    run.attach(model)
    own = {p: torch.optim.AdamW([p], lr=1e-3) for p in model.parameters()}

    def hook(p: Tensor) -> None:
        own[p].step()  # type: ignore[index]
        own[p].zero_grad()  # type: ignore[index]

    for p in own:
        p.register_post_accumulate_grad_hook(hook)
    data = text(run)
    for i in run.each():
        loss = model(*data[i])
        loss.backward()
        run.loss(loss)
