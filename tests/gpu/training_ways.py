"""Loops around what happens to a model: recomputation, streams, offload, evaluation, several models, resume."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from training_loops import adamw, lm, loop, plain, text
from training_models import Lm
from training_registry import THREE, scenario
from training_run import Run

# ---- recomputation, streams, offload


@scenario(THREE)
def checkpoint_nonreentrant(run: Run) -> None:
    """Activation checkpointing."""
    plain(run, lm(run, torch.bfloat16, recompute="nonreentrant"))


@scenario(THREE)
def checkpoint_reentrant(run: Run) -> None:
    """The older kind."""
    plain(run, lm(run, torch.bfloat16, recompute="reentrant"))


@scenario(THREE)
def checkpoint_selective(run: Run) -> None:
    """Products are kept, the rest is computed again."""
    plain(run, lm(run, torch.bfloat16, recompute="selective"))


@scenario(THREE)
def save_on_cpu(run: Run) -> None:
    """Activations wait for backward on the host."""
    model = lm(run, torch.bfloat16)

    def forward(*batch: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu(pin_memory=run.cuda):
            out: Tensor = model(*batch)
        return out

    plain(run, model, forward)


@scenario(THREE, cuda=True)
def side_stream(run: Run) -> None:
    """Forward, backward and optimizer on a stream that is not the default one; odd steps on a third one."""
    model = lm(run, torch.bfloat16)
    run.attach(model)
    optimizer, data = adamw(model), text(run)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    for i in run.each():
        stream, other = streams[i % 2], streams[1 - i % 2]
        stream.wait_stream(other)
        with torch.cuda.stream(stream):
            loss = model(*data[i])
            loss.backward()
            run.loss(loss)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    torch.cuda.synchronize()


@scenario(cuda=True)
def attached_on_cpu(run: Run) -> None:
    """Attach while the model lies on the host, and move it then."""
    model = Lm(run.size(256, 64), 2).bfloat16()
    run.attach(model)
    model.cuda()
    loop(run, model, adamw(model))


@scenario()
def meta_init(run: Run) -> None:
    """Built without values, given memory and values, attached."""
    with torch.device("meta"):
        model = Lm(run.size(256, 64), 2).bfloat16()
    model.to_empty(device=run.device)
    torch.manual_seed(0)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.02) if p.ndim > 1 else torch.nn.init.ones_(p)
    plain(run, model)


@scenario(cuda=True)
def two_devices(run: Run) -> None:
    """Half of the layers on the host, half on the device."""
    first, second = nn.Sequential(nn.Linear(256, 256), nn.GELU()), nn.Sequential(nn.Linear(256, 256), nn.GELU()).cuda()
    model = nn.ModuleDict({"first": first, "second": second}).bfloat16()
    run.attach(model)
    optimizer = adamw(model)
    data = [torch.randn(512, 256, dtype=torch.bfloat16) for _ in range(4)]
    for i in run.each():
        loss = second(first(data[i % 4]).cuda()).float().square().mean()
        loss.backward()
        run.loss(loss)
        optimizer.step()
        optimizer.zero_grad()


# ---- evaluation, several models, resume


@scenario(("defaults", "observe", "delayed"))
def evaluated(run: Run) -> None:
    """Passes without gradients between the steps, the second in inference mode."""
    model = lm(run, torch.bfloat16)
    watch = run.attach(model)
    optimizer, data = adamw(model), text(run)
    for i in run.each():
        loss = model(*data[i])
        loss.backward()
        run.loss(loss)
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            valid = model(*data[0])
        with torch.inference_mode():
            model(*data[1])
        model.train()
        if watch is not None:
            watch.log(valid=valid)


@scenario()
def two_models(run: Run) -> None:
    """Two watched models by turns: a student, and a teacher that trains as well."""
    student, teacher = lm(run, torch.bfloat16), lm(run, torch.bfloat16)
    run.attach(student)
    run.attach(teacher, run_id=f"{run.name}-teacher")
    one, two, data = adamw(student), adamw(teacher), text(run)
    for i in run.each():
        loss = student(*data[i])
        loss.backward()
        one.step()
        one.zero_grad()
        other = teacher(*data[-i])
        other.backward()
        two.step()
        two.zero_grad()
        run.loss(loss + other)
    run.ended *= 2


@scenario()
def attached_again(run: Run) -> None:
    """Detached in the middle, trained on, attached again with another recipe."""
    model = lm(run, torch.bfloat16)
    optimizer, data = adamw(model), text(run)
    watch = run.attach(model)
    third = run.num_steps // 3
    for i in run.each():
        if i == third and watch is not None:
            watch.detach()
        if i == 2 * third and run.watched:
            run.attach(model, keep=False, start_step=i)
        loss = model(*data[i])
        loss.backward()
        run.loss(loss)
        optimizer.step()
        optimizer.zero_grad()
    run.ended -= third


@scenario(("defaults", "observe", "delayed"))
def resumed(run: Run) -> None:
    """Saved in the middle, and gone on with in a model of its own."""
    model, data, half = lm(run, torch.bfloat16), text(run), run.num_steps // 2
    optimizer = adamw(model)
    watch = run.attach(model, keep=False)
    steps = run.each()
    for i in steps:
        loss = model(*data[i])
        loss.backward()
        run.loss(loss)
        optimizer.step()
        optimizer.zero_grad()
        if i == half - 1:
            break
    steps.close()  # type: ignore[attr-defined]
    run.end()
    path = run.folder / "checkpoint.pt"
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    if watch is not None:
        state["fp8watch"] = watch.state_dict()
    torch.save(state, path)
    if watch is not None:
        watch.detach()
    saved = torch.load(path, weights_only=False)
    model = lm(run, torch.bfloat16)
    optimizer = adamw(model)
    again = run.attach(model)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    if again is not None:
        again.load_state_dict(saved["fp8watch"])
    for i in run.each(run.num_steps - half):
        loss = model(*data[i])
        loss.backward()
        run.loss(loss)
        optimizer.step()
        optimizer.zero_grad()


@scenario()
def copied(run: Run) -> None:
    """A deep copy of a watched model that follows as a running mean."""
    model = lm(run, torch.bfloat16)
    run.attach(model)
    mean = copy.deepcopy(model).requires_grad_(False)
    optimizer, data = adamw(model), text(run)
    for i in run.each():
        loss = model(*data[i])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for a, b in zip(mean.parameters(), model.parameters(), strict=True):
                a.lerp_(b, 0.1)
            run.loss(loss + mean(*data[0]))
