"""Reinforcement learning of a language model: sampled continuations, a reward, policy gradient with a KL penalty to a frozen reference."""

from __future__ import annotations

import copy

import torch
from proving.data import generator, windows
from proving.families import parts
from proving.training import Training
from torch import Tensor, nn

PROMPT, ANSWER, GROUP = 12, 8, 4


class Rollout:
    """Samples answers, scores them, and remembers what a person plots: reward, KL, entropy."""

    def __init__(self, reference: nn.Module, kl_weight: float, target: Tensor) -> None:
        self.reference, self.kl_weight, self.target = reference, kl_weight, target
        self.plots: dict[str, float] = {}

    @torch.no_grad()
    def sample(self, model: nn.Module, prompts: Tensor, random: torch.Generator) -> Tensor:
        """Prompts [B, T] -> prompts with ANSWER sampled bytes [B, T + ANSWER]."""
        model.eval()
        tokens = prompts
        for _ in range(ANSWER):
            chances = model(tokens)[:, -1].float().nan_to_num().softmax(-1)
            tokens = torch.cat((tokens, torch.multinomial(chances, 1, generator=random)), 1)
        model.train()
        return tokens

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Group-relative advantages; the KL estimator that is never negative."""
        prompts = batch["input_ids"].repeat_interleave(GROUP, 0)
        random = torch.Generator().manual_seed(int(batch["number"]))
        tokens = self.sample(model, prompts, random)
        answer = tokens[:, PROMPT:]
        reward = self.target[answer].float().mean(-1)
        grouped = reward.view(-1, GROUP)
        advantage = ((grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-3)).view(-1, 1)
        chances = model(tokens[:, :-1])[:, PROMPT - 1 :].float().log_softmax(-1)
        picked = chances.gather(-1, answer[..., None])[..., 0]
        with torch.no_grad():
            other = self.reference(tokens[:, :-1])[:, PROMPT - 1 :].float().log_softmax(-1)
            other = other.gather(-1, answer[..., None])[..., 0]
        gap = other - picked
        kl = gap.exp() - gap - 1
        entropy = -(chances.exp() * chances).sum(-1).mean()
        self.plots = {"reward": reward.mean(), "kl": kl.mean().detach(), "entropy": entropy.detach()}
        return (-(advantage * picked) + self.kl_weight * kl).mean()


def pretrain(model: nn.Module, steps: int = 25) -> None:
    """The policy can write a little before it is rewarded."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        window = windows(998, step, 8, 25)
        optimizer.zero_grad()
        parts.next_token_loss(model(window[:, :-1]), window[:, 1:]).backward()
        optimizer.step()


def build(seed: int, rank: int = 0) -> Training:
    """A Llama of 2 layers of 128; 4 prompts × 4 answers; rewarded for lower-case letters, digits or spaces."""
    rng = parts.drawing("rl", seed)
    model = parts.Decoder(256, 128, [parts.Block(128, 4, 2, parts.SwiGLU(128, 256)) for _ in range(2)])
    pretrain(model)
    reference = copy.deepcopy(model).requires_grad_(False).eval()
    target = torch.zeros(256, dtype=torch.bool)
    target[
        [b for b in range(256) if chr(b) in ["abcdefghijklmnopqrstuvwxyz", "0123456789", " \n"][int(rng.integers(3))]]
    ] = 1
    rollout = Rollout(reference, float(rng.uniform(0.02, 0.1)), target)
    rate = parts.learning_rate(rng, 1e-4, 5e-4)

    def batch(number: int) -> dict[str, Tensor]:
        salt = int(torch.randint(1 << 40, (), generator=generator(seed, number, 3)))
        return {"input_ids": windows(seed, number, 4, PROMPT), "number": torch.tensor(salt)}

    t = Training(
        family="rl",
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.99), weight_decay=0.0),
        batch=batch,
        loss=rollout.loss,
        log=lambda t, step: {name: float(value) for name, value in rollout.plots.items()},
        seed=seed,
        notes=parts.roles(model, parts.LLAMA_ROLES) | {"causal": True, "tokens": False, "vocab": 256},
    )
    t.notes["rollout"] = rollout
    t.schedule = lambda step: rate * min(1.0, (step + 1) / 10)
    return t
