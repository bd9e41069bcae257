"""The hash of the weights: every bit, on every rank, in the same steps."""

from __future__ import annotations

import random

import pytest
import torch

from fp8watch.kernels import cpu_library
from fp8watch.sketch.weight_hash import CHUNK, hash_bits
from fp8watch_agent.record import Measured


def reference(x):
    bits = x.contiguous().view(-1).view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()]).tolist()
    total = sum(b * (2 * i + 1) for i, b in enumerate(bits)) % 2**64
    return total - 2**64 if total >= 2**63 else total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_thousand_flips_of_one_bit_are_all_seen(dtype):
    torch.manual_seed(0)
    rng = random.Random(0)
    x = torch.randn(37, 129).to(dtype)
    before, seen = int(hash_bits(x)), set()
    ints = x.view(-1).view(torch.int16 if dtype.itemsize == 2 else torch.int32)
    width = 8 * dtype.itemsize
    places = [(i, bit) for i in (0, x.numel() - 1) for bit in range(width)]  # the ends, and anywhere
    places += [(rng.randrange(x.numel()), rng.randrange(width)) for _ in range(1000)]
    for i, bit in places:
        mask = 1 << bit if bit < width - 1 else -(1 << bit)
        ints[i] ^= mask
        flipped = int(hash_bits(x))
        assert flipped != before, (i, bit)
        seen.add(flipped)
        ints[i] ^= mask
    assert int(hash_bits(x)) == before
    assert len(seen) > 950


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (2, CHUNK - 1), (CHUNK + 3, 2)])
def test_the_hash_is_its_formula_in_pieces_too(shape):
    torch.manual_seed(1)
    x = torch.randn(shape)
    assert int(hash_bits(x)) == reference(x)
    t = torch.randn(5, 7).t()
    assert int(hash_bits(t)) == reference(t)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1,), (4097,), (3, 2 * 4096 + 5), (700, 300), (0, 3)])
def test_the_hash_in_c_is_that_of_torch(dtype, shape, monkeypatch):
    assert cpu_library.load() is not None
    torch.manual_seed(2)
    x = (100 * torch.randn(shape)).to(dtype)
    mine = hash_bits(x)
    assert (mine.dtype, mine.shape) == (torch.int64, ())
    monkeypatch.setattr(cpu_library, "library", None)
    assert int(mine) == int(hash_bits(x))


def test_what_c_does_not_read_is_hashed_by_torch():
    assert cpu_library.load() is not None
    x = torch.randn(6, 8)
    assert int(hash_bits(x[:, ::2])) == reference(x[:, ::2])
    assert int(hash_bits(torch.view_as_complex(x.view(6, 4, 2)).conj().imag)) == reference(-x[:, 1::2])
    assert int(hash_bits(torch.nn.Parameter(x))) == reference(x)
    with pytest.raises(KeyError):
        hash_bits(torch.zeros(2, dtype=torch.complex128))


def test_nan_and_the_sign_of_zero_are_bits_as_well():
    x = torch.zeros(4, 4)
    y = x.clone()
    y[1, 1] = -0.0
    assert int(hash_bits(x)) != int(hash_bits(y))
    assert int(hash_bits(torch.full((2, 2), float("nan")))) == int(hash_bits(torch.full((2, 2), float("nan"))))


def hashed(watch, step):
    _, rows = watch._recorder.step(step)
    return {site: int(r["weight_hash"]) for site, r in rows.items() if int(r["measured"]) & Measured.HASH}


@pytest.mark.parametrize("recipe", ["blockwise", "delayed", "observe"])
def test_weights_are_hashed_as_the_gemm_reads_them_in_their_steps(attach, mlp, train, recipe):
    watch = attach(mlp, recipe=recipe, hash_every=4, start_step=2)
    want = []
    optimizer = torch.optim.SGD(mlp.parameters(), lr=0.1)
    for _ in range(5):
        want.append({m: int(hash_bits(getattr(mlp, m).weight)) for m in ("up", "down")})
        for _ in range(2):  # micro-batches
            mlp(torch.randn(32, 64)).backward()
        optimizer.step()
    turns = {2: ["up", "down"], 3: [], 4: ["up"], 5: [], 6: ["down"]}  # in the first step all, then one after the other
    for i, step in enumerate(range(2, 7)):
        assert hashed(watch, i) == {(m, "weight", "rowwise"): want[i][m] for m in turns[step]}


def hashes_of(attach, num_steps, num_weights=6, **kwargs):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(num_weights)])
    watch = attach(model, **kwargs)
    for _ in range(num_steps):
        model(torch.randn(8, 32)).sum().backward()
        watch.step()
    return [set(hashed(watch, i)) for i in range(num_steps)]


def test_each_weight_is_hashed_once_in_so_many_steps_and_no_step_hashes_all(attach):
    of_step = hashes_of(attach, 33, hash_every=32)
    assert len(of_step[0]) == 6
    assert max(len(sites) for sites in of_step[1:]) == 1
    assert sorted(site for sites in of_step[1:] for site in sites) == sorted(of_step[0])


@pytest.mark.parametrize("recipe", ["blockwise", "observe"])
@pytest.mark.parametrize("num_weights", [6, 40])
def test_by_default_every_weight_is_hashed_within_any_32_steps(attach, num_weights, recipe):
    of_step = hashes_of(attach, 72, num_weights, recipe=recipe)
    everything = of_step[0]
    assert len(everything) == num_weights
    for first in range(1, len(of_step) - 31):
        assert set().union(*of_step[first : first + 32]) == everything
    assert max(len(sites) for sites in of_step[1:]) == -(-num_weights // 32)


def test_replicas_hash_the_same_weights_in_the_same_step(attach, monkeypatch):
    monkeypatch.setenv("FP8WATCH_RUN", "one")
    monkeypatch.setenv("WORLD_SIZE", "4")
    of_ranks = []
    for rank in ("0", "3"):
        monkeypatch.setenv("RANK", rank)
        of_ranks.append(hashes_of(attach, 9, hash_every=8, every=8))
    assert of_ranks[0] == of_ranks[1]
    assert sum(map(bool, of_ranks[0][1:])) >= 5


def test_hashes_leave_between_samples_as_well(attach, mlp, train):
    watch = attach(mlp, every=1000, hash_every=4)
    train(mlp, steps=7)
    assert [len(hashed(watch, i)) for i in range(7)] == [2, 0, 1, 0, 1, 0, 1]


def test_hashing_is_switched_off_by_zero_and_refused_below(attach, mlp, train):
    watch = attach(mlp, hash_every=0)
    train(mlp, steps=2)
    assert hashed(watch, 0) == {}
    with pytest.raises(ValueError, match="hash_every=-1"):
        attach(mlp, hash_every=-1)
