"""A model of Transformer Engine with an observer on it, and what it has seen."""

import torch

from fp8watch.integrations import te_modules
from fp8watch.integrations.transformer_engine import TeObserver
from fp8watch_agent.guard import Guard

FEATURES, HIDDEN, TOKENS = 128, 256, 256


class Watched:
    def __init__(self, te, model):
        self.te, self.model, self.guard = te, model, Guard()
        modules = te_modules.find(model.named_modules())
        self.sites = [site for module in modules for site in module.sites]
        self.seen = {}
        self.said = []
        self.observer = TeObserver(
            modules, 0, self._record, self.guard, tell=lambda line, facts: self.said.append((line, dict(facts)))
        )
        assert self.observer.start() is None

    def _record(self, row, shape, stats):
        site = self.sites[row]
        assert stats.shape == shape
        self.seen.setdefault((site.fqn, site.operand, site.direction), []).append((row, stats))

    def train(self, recipe, call=lambda model, x: model(x), steps=2):
        for _ in range(steps):
            x = torch.randn(TOKENS, FEATURES, dtype=torch.bfloat16, requires_grad=True)
            if recipe is None:
                y = call(self.model, x)
            else:
                with self.te.fp8_autocast(enabled=True, fp8_recipe=recipe):
                    y = call(self.model, x)
            y.float().square().mean().backward()
            self.observer.end_step()

    def missing(self):
        return [key for s in self.sites if (key := (s.fqn, s.operand, s.direction)) not in self.seen]

    def evidence(self):
        """Of each site that was seen: is it what the site claims?"""
        facts = self.observer.numerics
        return {k: facts[calls[0][0]].evidence == self.sites[calls[0][0]].evidence for k, calls in self.seen.items()}

    def exact(self):
        return sum(self.observer.numerics[calls[0][0]].evidence["energies"] == "exact" for calls in self.seen.values())

    def clean(self):
        """Nothing failed inside, nothing was unread, and each site was seen once a step."""
        assert dict(self.guard.errors) == {}
        assert self.said == []
        assert {len(calls) for calls in self.seen.values()} == {2}
