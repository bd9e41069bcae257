"""A recorder that keeps what it is handed, and what a training is compared by."""

from __future__ import annotations

import pytest
from attach.conftest import Kept, refused_nothing  # noqa: F401

import fp8watch.session.start as start_module


class Trainings(list[Kept]):
    """Recorders of the watches that were attached, in order."""

    def steps(self) -> list[int]:
        """Numbers of all recorded steps."""
        return [int(header["step"]) for kept in self for header, *_ in kept.steps]

    def losses(self) -> dict[int, float]:
        return self._scalars("loss")

    def norms(self) -> dict[int, float]:
        return self._scalars("grad_norm")

    def _scalars(self, name: str) -> dict[int, float]:
        return {int(header["step"]): float(header[name]) for kept in self for header, *_ in kept.steps}

    def run_ids(self) -> set[str]:
        return {kept.session.run_id for kept in self}


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path) -> Trainings:
    """What all watches of a test recorded."""
    monkeypatch.setenv("FP8WATCH_SPOOL_DIR", str(tmp_path / "spool"))
    for name in ("FP8WATCH_RUN", "FP8WATCH_COLLECTOR", "FP8WATCH_RECIPE"):
        monkeypatch.delenv(name, raising=False)
    made = Trainings()

    def recorder(*args, **kwargs) -> Kept:
        made.append(Kept(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(start_module, "Recorder", recorder)
    return made
