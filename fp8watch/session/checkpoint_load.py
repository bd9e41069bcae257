"""Whether what was loaded is what was saved: fingerprints compared at a resume.

Thread:     training, once a load

Weights may be loaded before or after the watch's own state. So those that differ at once are looked at again where the
first optimizer steps: by then everything is loaded, and nothing has been updated. Moments are looked at only then, because
only then the optimizer is known: those of each optimizer before its own first step. They are compared when all parameters that had
moments have been met, or an optimizer steps again. Delayed scales are loaded with the
watch's state: what differs of them is said at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from fp8watch.session.fingerprint import HASHED, MOMENTS, Fingerprint, differences

LOADED = "loaded_"
"""Facts of a session, such as "loaded_weights": names that are not as they were saved."""
AS_SAVED = "as saved"
DELAYED = "delayed"
OF_WEIGHTS = tuple(group for group in HASHED if group not in (DELAYED, MOMENTS))
Facts = Mapping[str, Any]
Optimizer = torch.optim.Optimizer


class CheckpointLoad:
    """The comparison of one watch.

    Args:
        fingerprint: of what is there now; `in_step` where a step runs.
        moments: hashes of what one optimizer keeps, by name, and the names of its parameters.
        say: tells people.
        tell: adds facts to the session.
    """

    def __init__(
        self,
        fingerprint: Callable[..., Fingerprint],
        moments: Callable[[Optimizer], tuple[Mapping[str, str], Collection[str]]],
        say: Callable[[str], None],
        tell: Callable[[Facts], None],
    ) -> None:
        self._fingerprint, self._moments_of, self._say, self._tell = fingerprint, moments, say, tell
        self.pending: Mapping[str, Any] | None = None
        """What is to be held against the weights before their first update, and against moments before theirs."""
        self._moments: dict[str, str] = {}
        self._names: set[str] = set()  # of parameters of optimizers that were met
        self._met: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def begin(self, saved: object) -> None:
        """A state has been loaded; one of an older version has no fingerprint."""
        self.pending = None
        self._forget()
        if not isinstance(saved, Mapping):
            return
        found = differences(saved, self._fingerprint())
        self._told({DELAYED: found[DELAYED]} if DELAYED in found else {})
        if any(group in found for group in OF_WEIGHTS) or saved.get(MOMENTS):
            self.pending = saved

    def before(self, optimizer: Optimizer, owns: Callable[[Optimizer], bool]) -> None:
        """An optimizer is about to step: nothing is loaded any more. What differs of the weights is said before the first, what
        differs of moments before the last of those that have them."""
        if self.pending is None or not owns(optimizer):
            return
        saved, moments = self.pending, self.pending.get(MOMENTS) or {}
        if again := optimizer in self._met:
            self.pending = None
        elif not self._met:
            found = differences(saved, self._fingerprint(in_step=True))
            self._told({group: found[group] for group in OF_WEIGHTS if group in found})
        self._met.add(optimizer)
        if not again:
            hashes, names = self._moments_of(optimizer)
            self._moments.update(hashes)
            self._names.update(names)
        if again or all(name.partition(" of ")[2] in self._names for name in moments):
            self.pending = None
            self._told(differences({MOMENTS: moments}, {MOMENTS: self._moments}))
            self._forget()

    def _forget(self) -> None:
        self._moments = {}
        self._names.clear()
        self._met.clear()

    def _told(self, found: Mapping[str, str]) -> None:
        if not found:
            return
        words = "; ".join(f"{group}: {names}" for group, names in found.items())
        self._say(f"what was loaded is not what was saved: {words}")
        facts = {f"{LOADED}{group}": names for group, names in found.items()}
        self._tell(facts | {f"checkpoint.{name}": AS_SAVED for name in facts})
