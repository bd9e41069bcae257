"""What is asked with each batch costs the same for any number of ranks, and says what a loop over all of them would."""

from __future__ import annotations

import random

import numpy as np
from detect.healthy_run import Run

from fp8watch_server.detect.cross_rank_step import CrossRankStep
from fp8watch_server.detect.families.degenerate import ZeroTiles
from fp8watch_server.detect.rank_progress import RankProgress
from fp8watch_server.detect.session_state import Stream
from fp8watch_server.detect.step_alignment import LIVE_RANK_STEPS, Assembly
from fp8watch_server.detect.step_view import BatchColumns, SiteTable
from fp8watch_server.detect.tallies import Seen, Tally


def stream(rank: int) -> Stream:
    return Stream(rank=rank, zero_tiles=ZeroTiles(0))


def test_the_settled_step_is_that_of_a_loop_over_all_ranks() -> None:
    rng = random.Random(3)
    streams: dict[str, Stream] = {}
    progress, restarted = RankProgress(), 0
    for num_heard in range(1, 4000):
        rank = rng.randrange(12)
        names = progress.sessions(rank)
        if not names or rng.random() < 0.01:
            if names:
                progress.restart()
                restarted = num_heard
            for name in list(names)[:-1]:
                del streams[name]
                progress.forget(name, rank)
            name = f"{rank}-{num_heard}"
            streams[name] = stream(rank)
            progress.begin(name, streams[name])
        name = progress.sessions(rank)[-1] if rng.random() < 0.9 else progress.sessions(rank)[0]
        streams[name].heard = num_heard
        if rng.random() < 0.9:
            streams[name].advance((streams[name].last_step or 0) + rng.choice((1, 1, 2, 50)))
        progress.heard(name, streams[name])
        newest = {s.rank: s for s in streams.values()}
        stride = max(s.stride for s in streams.values())
        last = [s.last_step for s in newest.values() if s.last_step is not None and s.heard >= restarted]
        want = min((n for n in last if n >= max(last) - LIVE_RANK_STEPS * stride), default=None)
        assert (progress.settled, progress.stride) == (want, stride)
        rebuilt = RankProgress.of(streams, restarted)
        assert (rebuilt.settled, rebuilt.stride) == (want, stride)


def test_sequence_numbers_in_any_order_are_new_once_and_lie_in_few_ranges() -> None:
    rng = random.Random(4)
    numbers = list(range(1, 2000))
    late = [numbers.pop(rng.randrange(len(numbers))) for _ in range(30)]
    seen = Seen()
    assert all(seen.add(n) for n in numbers)
    assert not any(seen.add(n) for n in numbers)
    assert len(seen.ranges) <= 31
    assert all(seen.add(n) for n in late)
    assert seen.ranges == [[1, 1999]]


def test_of_many_gaps_the_lowest_numbers_are_forgotten() -> None:
    seen = Seen(max_ranges=3)
    assert all(seen.add(n) for n in (1, 3, 5, 7))
    assert seen.ranges == [[3, 3], [5, 5], [7, 7]]
    assert seen.add(1)


def test_a_tally_holds_the_numbers_that_a_key_has() -> None:
    rng, tally, plain = random.Random(5), Tally(), dict[int, int]()
    for _ in range(3000):
        key, number = rng.randrange(20), rng.randrange(5)
        if rng.random() < 0.2:
            tally.drop(key)
            plain.pop(key, None)
        else:
            tally.put(key, number)
            plain[key] = number
        assert set(tally.numbers) == set(plain.values())


class Delivery:
    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.step, self.opens_batch, self.num_records = rank, step, True, 1


def test_all_ranks_are_not_asked_with_each_batch_of_a_step_that_waits(monkeypatch) -> None:
    num, asked = 2000, [0]
    assembly: Assembly[Delivery] = Assembly()
    for rank in range(num):
        assembly.expect(rank)
    awaited = Assembly._is_awaited

    def counted(self, *args):
        asked[0] += 1
        return awaited(self, *args)

    monkeypatch.setattr(Assembly, "_is_awaited", counted)
    went_on = None
    for rank in range(num):  # over 40 s: beyond the 10 s that the median is waited for
        at = rank / num * 40.0
        assembly.heard(rank, at)
        assembly.add(Delivery(rank, 1))
        if list(assembly.ready()) and went_on is None:
            went_on = at
    assert asked[0] < 200 * num  # a loop over all ranks with each would be 1,500 times
    assert went_on is not None
    assert 30.0 <= went_on <= 31.0  # half of them had delivered at 20 s


def test_a_nan_in_one_field_of_a_rank_takes_no_other_field_from_it() -> None:
    """Signal energy and noise energy are of one group: the one is NaN, the other is summed over both ranks all the same."""

    def change(rows, _scalars, _step):
        rows["signal_energy"][3] = np.nan
        rows["noise_energy"] = 2.0

    ranks = [Run(rank=0), Run(rank=1, seed=1)]
    table = SiteTable(ranks[0].facts)
    batches = [ranks[0].batch([0], change), ranks[1].batch([0], change)]
    now = CrossRankStep([view for b in batches for view in BatchColumns(b, table).views()], table)
    signal, noise, tiles = now.column("signal_energy"), now.column("noise_energy"), now.column("tile_noise_ratio_sum")
    assert np.isnan(signal[3])
    assert (np.delete(signal, 3) == 2.0).all()
    assert (noise == 4.0).all()
    assert np.isfinite(tiles).all()
    amax = [b.column("amax_max").astype(np.float64) for b in batches]
    assert (now.column("amax_max") == np.maximum(*amax)).all()
