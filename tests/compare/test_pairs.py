"""The sentence on pairs of real trainings, recorded through the product: the same but for one thing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from compare import trained
from compare.trained import ATTENTION, DOWN, ONSET, STEPS, train
from pages.collector import make_app, serving

pytestmark = pytest.mark.long

RUNS: dict[str, dict[str, Any]] = {
    "good": {},
    "twin": {},
    "bf16": {"recipe": "observe"},
    "other-data": {"data_seed": 1},
    "other-seed": {"seed": 1, "data_seed": 1},
    "lr-x3": {"lr": 6e-3},
    "inf": {"change": trained.overflow},
    "overwritten": {"change": trained.overwrite},
    "grown": {"change": trained.grow},
    "lr-x30": {"change": trained.faster},
    "deep": {"num_layers": 3, "name_data": False},
}
TOGETHER, IDENTICAL = "do not part", "identical to the last bit in loss and amax of"
PAIRS = [
    ("good", "twin", None, "", (IDENTICAL, f"in all of {STEPS} common steps (0 to {STEPS - 1})"), ""),
    ("good", "bf16", None, "", (TOGETHER,), "recipe"),
    ("good", "other-data", None, "", (TOGETHER,), f"data, from step 0 on ({STEPS} of {STEPS} steps)"),
    ("good", "other-seed", None, "", ("do not start from the same weights (14 of 14", TOGETHER), "data, from step 0"),
    ("good", "lr-x3", 1, "embedding output", ("identical to the last bit before step 1,",), "lr, from step 0 on"),
    ("good", "inf", ONSET, f"{DOWN} input", ("one side is not finite, and the other is",), ""),
    ("good", "overwritten", ONSET, f"{ATTENTION} weight", (f"identical to the last bit before step {ONSET}",), ""),
    ("good", "lr-x30", ONSET + 1, "embedding output", (f"before step {ONSET + 1}",), f"lr, from step {ONSET} on"),
    ("bf16", "grown", ONSET, f"{DOWN} input", (f"They part at step {ONSET}, first in {DOWN} input",), "recipe"),
    ("bf16", "inf", ONSET, f"{DOWN} input", (f"They part at step {ONSET}, first in {DOWN} input",), "recipe"),
    ("good", "deep", None, "", ("do not start from the same weights",), "num_linears"),
]


class Pairs:
    """A collector, and the trainings that were asked for, each made once."""

    def __init__(self, client: httpx.Client, patch: pytest.MonkeyPatch) -> None:
        self._client, self._patch, self._done = client, patch, set[str]()

    def compared(self, a: str, b: str, **query: Any) -> dict[str, Any]:
        for name in (a, b):
            if name not in self._done:
                self._done.add(name)
                self._train(name)
        answer = self._client.get("/api/v1/compare", params={"a": a, "b": b, **query})
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def _train(self, name: str) -> None:
        url = str(self._client.base_url).rstrip("/")
        if name != "ranks":
            return train(url, name, **RUNS[name])
        with self._patch.context() as patch:  # two replicas, of which the second breaks
            for rank in range(2):
                patch.setenv("RANK", str(rank))
                patch.setenv("WORLD_SIZE", "2")
                train(url, "ranks", change=trained.overwrite if rank else None)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pairs]:
    with pytest.MonkeyPatch.context() as patch, serving(make_app(tmp_path_factory.mktemp("pairs"))) as client:
        patch.setenv("FP8WATCH_SPOOL_DIR", str(tmp_path_factory.mktemp("spool")))
        yield Pairs(client, patch)


@pytest.mark.parametrize(("a", "b", "step", "site", "words", "fact"), PAIRS, ids=[f"{p[0]}-{p[1]}" for p in PAIRS])
def test_the_sentence_is_right(
    pairs: Pairs, a: str, b: str, step: int | None, site: str, words: tuple[str, ...], fact: str
) -> None:
    for first, second in ((a, b), (b, a)):
        found = pairs.compared(first, second)
        assert found["parting"]["step"] == step, found["sentence"]
        for part in words:
            assert part in found["sentence"]
        if site:
            named = found["parting"]["sites"][0]
            assert f"{named['module']} {named['operand']}" == site
            assert f"first in {site}" in found["sentence"]
        if fact:
            assert any(f["fact"].startswith(fact) for f in found["facts"])
        else:
            assert found["facts"] == []


def test_what_only_one_has_and_what_was_not_looked_at_is_named(pairs: Pairs) -> None:
    found = pairs.compared("good", "deep")
    assert "layers.2.mlp.down_proj weight" in found["only_b"]
    assert found["only_a"] == []
    lines = " ".join(found["not_looked_at"])
    assert "sites that only the second has: layers.2." in lines
    assert "whether they saw the same data was not looked at" in lines
    assert pairs.compared("good", "twin")["not_looked_at"] == []


def test_ranks_of_one_run_are_held_against_each_other(pairs: Pairs) -> None:
    found = pairs.compared("ranks", "ranks", rank_a=0, rank_b=1)
    assert found["sentence"].startswith(
        f"They are identical to the last bit before step {ONSET}, and part there, first in {ATTENTION} weight"
    )
    assert IDENTICAL in pairs.compared("ranks", "ranks", rank_a=1, rank_b=1)["sentence"]
    assert IDENTICAL in pairs.compared("ranks", "good", rank_a=0)["sentence"]


def test_steps_that_are_chosen_are_the_ones_that_are_compared(pairs: Pairs) -> None:
    found = pairs.compared("good", "inf", to=ONSET - 1)
    assert f"in all of {ONSET} common steps (0 to {ONSET - 1})" in found["sentence"]
