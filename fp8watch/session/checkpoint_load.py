"""Whether what was loaded is what was saved: fingerprints compared at a resume.

Thread:     training, once a load

Weights may be loaded before or after the watch's own state. So what differs at once is looked at again where the first
optimizer steps: by then everything is loaded, and nothing has been updated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fp8watch.session.fingerprint import HASHED, Fingerprint, differences

LOADED = "loaded_"
"""Facts of a session, such as "loaded_weights": names that are not as they were saved."""
AS_SAVED = "as saved"


class CheckpointLoad:
    """The comparison of one watch.

    Args:
        fingerprint: of what is there now.
        say: tells people.
        tell: adds facts to the session.
    """

    def __init__(
        self,
        fingerprint: Callable[[], Fingerprint],
        say: Callable[[str], None],
        tell: Callable[[Mapping[str, Any]], None],
    ) -> None:
        self._fingerprint, self._say, self._tell = fingerprint, say, tell
        self.pending: Mapping[str, Any] | None = None
        """What is to be held against the weights before their first update."""

    def differences(self, saved: Mapping[str, Any]) -> dict[str, str]:
        """What is not as it was saved, see `fingerprint.differences`."""
        return differences(saved, self._fingerprint())

    def begin(self, saved: object) -> None:
        """A state has been loaded; one of an older version has no fingerprint."""
        self.pending = None
        if isinstance(saved, Mapping) and self._of_tensors(saved):
            self.pending = saved

    def settle(self) -> None:
        """Nothing is loaded any more: what differs now is said."""
        saved, self.pending = self.pending, None
        found = {} if saved is None else self._of_tensors(saved)
        if not found:
            return
        words = "; ".join(f"{group}: {names}" for group, names in found.items())
        self._say(f"what was loaded is not what was saved: {words}")
        facts = {f"{LOADED}{group}": names for group, names in found.items()}
        self._tell(facts | {f"checkpoint.{name}": AS_SAVED for name in facts})

    def _of_tensors(self, saved: Mapping[str, Any]) -> dict[str, str]:
        """What differs besides the recipe's facts, which the collector compares by itself."""
        found = self.differences(saved)
        return {group: found[group] for group in HASHED if group in found}
