"""Reinforcement learning whose parts no longer fit together: rollouts, reward, reference.

The second largest class of complaints of 2026 is a rollout engine that computes something else than the trainer. What
shows it are the scalars that people log; none of this is in a GEMM of the trainer. A training has a place for these where
its notes name a "rollout" with `sample(model, prompts, random)`, `target` and `reference`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from proving.faults._base import Lasting, log_uniform, onset, seed, until
from proving.training import Expected, Training
from torch import Tensor, nn


class RolloutMismatch(Lasting):
    """The rollout engine samples from other weights than the trainer has: scales that were not synced (verl #7224, vLLM
    #45835), a coarser format (miles #1678: KL ×500, log-prob difference ×26; verl #7519). The trainer logs KL and log-prob
    difference between the two, from the first step on, as verl does. Severity is the error of the engine's weights."""

    name = "rollout-mismatch"
    prepares = True
    errors: ClassVar[dict[str, tuple[float, float]]] = {
        "mild": (0.02, 0.06),
        "medium": (0.06, 0.2),
        "severe": (0.2, 0.8),
    }

    def __init__(self, *, error: float, seed: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.error = error
        self.rng = np.random.default_rng(seed)
        self.wrong = False
        self.seen: dict[str, float] = {}

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> RolloutMismatch | None:
        if "rollout" not in training.notes or training.log is None:
            return None
        error, step = log_uniform(rng, *cls.errors[severity]), onset(rng, training)
        return cls(
            step=step,
            until=until(rng, step, 5, 30, stays=0.7),
            severity=severity,
            expected=Expected(("scalar-shift",), None, None, None),
            drawn={"error": round(error, 4)},
            error=error,
            seed=seed(rng),
        )

    def started(self, t: Training) -> None:
        rollout, log = t.notes["rollout"], t.log
        assert log is not None
        sample = rollout.sample

        @torch.no_grad()
        def in_engine(model: nn.Module, prompts: Tensor, random: torch.Generator) -> Tensor:
            weights = [p for p in model.parameters() if p.ndim == 2]
            right = [p.detach().clone() for p in weights]
            for p in weights:
                p.data.copy_(self._engine_has(p))
            tokens: Tensor = sample(model, prompts, random)
            theirs = _chances(model, tokens, prompts.shape[1])
            for p, was in zip(weights, right, strict=True):
                p.data.copy_(was)
            ours = _chances(model, tokens, prompts.shape[1])
            gap = ours - theirs
            self.seen = {
                "rollout_corr/kl": float(-gap.mean()),
                "rollout_corr/k3_kl": float((gap.exp() - gap - 1).mean()),
                "rollout_corr/log_ppl_abs_diff": float(gap.mean(1).abs().mean()),
            }
            return tokens

        rollout.sample = in_engine
        t.log = lambda t, step: log(t, step) | self.seen

    def _engine_has(self, weight: Tensor) -> Tensor:
        """The weight in BF16, as an engine keeps it; wrong, with an error as large as was drawn."""
        kept = weight.detach().bfloat16().to(weight.dtype)
        if not self.wrong:
            return kept
        noise = torch.from_numpy(self.rng.standard_normal(tuple(weight.shape))).to(weight.dtype)
        return kept + noise * (self.error * kept.norm() / noise.norm())

    def begin(self, t: Training) -> None:
        self.wrong = True
        self.later(lambda: setattr(self, "wrong", False))


@torch.no_grad()
def _chances(model: nn.Module, tokens: Tensor, prompt: int) -> Tensor:
    """Log-probabilities of the sampled tokens: [B, answer]."""
    was = model.training
    model.eval()
    found = model(tokens[:, :-1])[:, prompt - 1 :].float().log_softmax(-1)
    model.train(was)
    return found.gather(-1, tokens[:, prompt:, None])[..., 0]


class RewardChanges(Lasting):
    """The reward is computed from something else: a verifier that was updated, an answer key that moved. Severity is the
    share of what is rewarded otherwise."""

    name = "reward-changes"
    shares: ClassVar[dict[str, tuple[float, float]]] = {
        "mild": (0.1, 0.25),
        "medium": (0.25, 0.6),
        "severe": (0.6, 1.0),
    }

    def __init__(self, *, share: float, seed: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.share, self.seed = share, seed

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> RewardChanges | None:
        if "rollout" not in training.notes or training.log is None:
            return None
        share, step = float(rng.uniform(*cls.shares[severity])), onset(rng, training)
        return cls(
            step=step,
            until=until(rng, step, 5, 30, stays=0.8),
            severity=severity,
            expected=Expected(("scalar-shift", "bad-batch"), None, None, False),
            drawn={"share": round(share, 3)},
            share=share,
            seed=seed(rng),
        )

    def begin(self, t: Training) -> None:
        rollout = t.notes["rollout"]
        right = rollout.target
        flips = torch.from_numpy(np.random.default_rng(self.seed).random(tuple(right.shape)) < self.share)
        flips.view(-1)[0] = True
        rollout.target = right ^ flips
        self.later(lambda: setattr(rollout, "target", right))


class ReferenceLost(Lasting):
    """The frozen reference of the KL penalty is another model: an old checkpoint, or one that was synced with the policy's
    wrong half. Severity is the error of its weights."""

    name = "reference-lost"
    errors: ClassVar[dict[str, tuple[float, float]]] = {
        "mild": (0.05, 0.15),
        "medium": (0.15, 0.5),
        "severe": (0.5, 2.0),
    }

    def __init__(self, *, error: float, seed: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.error, self.seed = error, seed

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> ReferenceLost | None:
        if "rollout" not in training.notes or training.log is None:
            return None
        error, step = log_uniform(rng, *cls.errors[severity]), onset(rng, training)
        return cls(
            step=step,
            until=until(rng, step, 5, 30, stays=0.8),
            severity=severity,
            expected=Expected(("scalar-shift", "bad-batch"), None, None, False),
            drawn={"error": round(error, 3)},
            error=error,
            seed=seed(rng),
        )

    @torch.no_grad()
    def begin(self, t: Training) -> None:
        rng, reference = np.random.default_rng(self.seed), t.notes["rollout"].reference
        weights = [p for p in reference.parameters() if p.ndim == 2]
        right = [p.clone() for p in weights]
        for p in weights:
            noise = torch.from_numpy(rng.standard_normal(tuple(p.shape))).to(p.dtype)
            p.add_(noise * (self.error * p.norm() / noise.norm()))

        def put_back() -> None:
            for p, was in zip(weights, right, strict=True):
                p.data.copy_(was)

        self.later(put_back)
