"""Transformer Engine itself, of the version that run.sh put on the path."""

import pytest
import torch
from loading import load
from watched import Watched

TE = load()


@pytest.fixture
def te():
    torch.manual_seed(0)
    return TE


@pytest.fixture
def watched():
    """Observes a model, and lets go of it afterwards."""
    made = []

    def watch(model):
        made.append(Watched(TE, model))
        return made[-1]

    yield watch
    for each in made:
        each.observer.stop()


def pytest_report_header():
    return (
        f"transformer_engine {TE.version} (Python package over a stand-in for its extension), torch {torch.__version__}"
    )
