"""Trainings of a few thousand parameters, one of each kind of place that a fault may need, for the tests of the faults."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from proving.data import generator
from proving.families import parts
from proving.families.moe import Experts, loss_with_extras
from proving.families.rl import ANSWER, PROMPT, Rollout
from proving.training import Training
from torch import Tensor, nn

VOCAB, DIM, TOKENS, STEPS = 64, 32, 12, 5
ONSET = (1, 2)


def _decoder(mlp: Callable[[], nn.Module]) -> parts.Decoder:
    return parts.Decoder(VOCAB, DIM, [parts.Block(DIM, 2, 1, mlp()) for _ in range(2)])


def _tokens(number: int) -> dict[str, Tensor]:
    window = torch.randint(0, VOCAB, (4, TOKENS + 1), generator=generator(0, number))
    mask = torch.arange(TOKENS) < torch.tensor([[TOKENS], [8], [10], [6]])
    labels = window[:, 1:].masked_fill(~mask, -100)
    return {"input_ids": window[:, :-1].contiguous(), "labels": labels, "attention_mask": mask.long()}


def _loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return parts.next_token_loss(model(batch["input_ids"]), batch["labels"])


def _training(family: str, model: nn.Module, loss: Callable[..., Tensor], batch: Callable[[int], object]) -> Training:
    t = Training(
        family=family,
        model=model,
        optimizer=parts.adamw(model, 3e-3),
        batch=batch,
        loss=loss,
        steps=STEPS,
        onset=ONSET,
        notes=parts.roles(model, parts.LLAMA_ROLES) | {"causal": True, "tokens": True, "vocab": VOCAB},
    )
    t.schedule = parts.warm_cosine(3e-3, 100, warm=5)
    return t


def language() -> Training:
    """A Llama on padded rows."""
    return _training("language", _decoder(lambda: parts.SwiGLU(DIM, 64)), _loss, _tokens)


def delayed() -> Training:
    """The same under delayed scaling."""
    t = language()
    t.family, t.recipe = "delayed", "delayed"
    return t


def ranks() -> Training:
    """The first of two ranks, without the other."""
    t = language()
    t.family, t.world_size = "ranks", 2
    return t


def scaler() -> Training:
    """Mixed FP16."""
    t = language()
    t.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=50)
    plain = t.loss

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            return plain(model, batch)

    t.family, t.loss = "scaler", loss
    return t


def experts() -> Training:
    """A mixture of four."""
    return _training("experts", _decoder(lambda: Experts(DIM, 32, 4)), loss_with_extras, _tokens)


def rollouts() -> Training:
    """Policy gradient."""
    model = _decoder(lambda: parts.SwiGLU(DIM, 32))
    rollout = Rollout(copy.deepcopy(model).requires_grad_(False).eval(), 0.1, torch.arange(VOCAB) % 2 == 0)

    def batch(number: int) -> dict[str, Tensor]:
        prompts = torch.randint(0, VOCAB, (2, PROMPT), generator=generator(0, number))
        return {"input_ids": prompts, "number": torch.tensor(number)}

    t = _training("rollouts", model, rollout.loss, batch)
    t.log = lambda t, step: {name: float(value) for name, value in rollout.plots.items()}
    t.notes |= {"tokens": False, "rollout": rollout, "answer": ANSWER}
    return t


def tied() -> Training:
    """One table for embedding and head, two groups of two queries, an MLP of two blocks of K, two micro-batches, prompts."""
    blocks = [parts.Block(DIM, 4, 2, parts.SwiGLU(DIM, 256)) for _ in range(2)]
    model = parts.Decoder(VOCAB, DIM, list(blocks))
    model.output.weight = model.tok_embeddings.weight

    def batch(number: int) -> dict[str, Tensor]:
        made = _tokens(number)
        return made | {"labels": made["labels"].masked_fill(torch.arange(TOKENS) < 3, -100)}

    t = _training("tied", model, _loss, batch)
    t.accumulate = 2
    return t


class _Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(64, 32), nn.Linear(32, 32), nn.Linear(32, 10)

    def forward(self, pixels: Tensor) -> Tensor:
        out: Tensor = self.head(self.down(self.up(pixels.flatten(1)).relu()).relu())
        return out


def images() -> Training:
    """A perceptron on noise."""

    def batch(number: int) -> dict[str, Tensor]:
        random = generator(0, number)
        return {
            "pixels": torch.randn(16, 8, 8, generator=random),
            "labels": torch.randint(0, 10, (16,), generator=random),
        }

    t = _training("images", _Images(), lambda m, b: F.cross_entropy(m(b["pixels"]), b["labels"]), batch)
    t.notes = parts.roles(t.model, {"mlp.up": "up", "mlp.down": "down", "head": "head"}) | {"classes": 10}
    return t


def current() -> Training:
    """Padded rows under current scaling."""
    t = language()
    t.family, t.recipe = "current", "current"
    return t


class _Taught:
    """How far a model is from a frozen one."""

    def __init__(self, teacher: nn.Module) -> None:
        self.teacher = teacher.requires_grad_(False).eval()

    def taught(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.teacher(tokens).log_softmax(-1)
        return out

    def __call__(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        learnt, taught = model(batch["input_ids"]).log_softmax(-1), self.taught(batch["input_ids"])
        return F.kl_div(learnt.flatten(0, 1), taught.flatten(0, 1), reduction="batchmean", log_target=True)


def taught() -> Training:
    """A Llama that learns from another one."""
    teacher = _decoder(lambda: parts.SwiGLU(DIM, 32))
    teacher.output.weight.data.mul_(20)
    model, loss = _decoder(lambda: parts.SwiGLU(DIM, 64)), _Taught(teacher)
    t = _training("taught", model, loss, _tokens)
    t.notes["distillation"] = loss
    return t


KINDS: dict[str, Callable[[], Training]] = {
    f.__name__: f for f in (language, experts, images, delayed, scaler, ranks, rollouts, tied, current, taught)
}
