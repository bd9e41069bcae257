"""What the C library finds in a batch is what numpy finds, to the last bit, whatever the batch looks like."""

from __future__ import annotations

import math

import pytest
import torch

from fp8watch.kernels import cpu_batch, cpu_library
from fp8watch.observer import batch_arithmetic, batch_facts
from fp8watch.observer.batch_facts import BatchFacts
from fp8watch_agent.batch_names import CONCENTRATION, COPIES, HASH, MASK, SCORED, SHIFTS, TARGETS

DTYPES = tuple(cpu_batch.BYTES)
SHARES = {SCORED, *SHIFTS.values()}


@pytest.fixture
def both_ways(monkeypatch):
    """Runs something with the library, where numpy is not to be asked for anything, and without it."""
    assert cpu_library.load() is not None

    def refuse(*_):
        raise AssertionError("numpy was asked")

    def run(action, *, library_reads=True):
        with monkeypatch.context() as m:
            for name in ("hash_integers", "copies", "concentration", "scored", "shares_of_shifts"):
                if library_reads:
                    m.setattr(batch_facts, name, refuse)
            found = action()
        with monkeypatch.context() as m:
            m.setattr(cpu_library, "library", None)
            m.setattr(batch_facts, "concentration_of", refuse)
            return found, action()

    return run


def same(one, other):
    """Equal, names and values, and so are those that are not numbers."""
    assert one.keys() == other.keys()
    return all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(one.values(), other.values(), strict=True))


def facts_of(args, kwargs=None, targets=None, ignored=-100, *, targets_first=False):
    """Of one pass as a step would take them; the hash besides with all of its bits."""
    facts = BatchFacts()
    if targets is not None and targets_first:
        facts.see_targets(targets, ignored)
    facts.see_inputs(args, kwargs or {})
    whole = facts._hash
    if targets is not None and not targets_first:
        facts.see_targets(targets, ignored)
    return {**facts.take(), "low": whole & (2**52 - 1), "high": whole >> 52 & 0xFFF}


class Cases:
    """Batches of every kind, from a seed."""

    def __init__(self, seed):
        self.make = torch.Generator().manual_seed(seed)

    def below(self, n, least=0):
        return int(torch.randint(least, n, (), generator=self.make))

    def one_of(self, *choices):
        return choices[self.below(len(choices))]

    def integers(self, rows, columns, dtype, span):
        """Laid out in one of five ways."""
        low = 0 if dtype == torch.uint8 or self.below(2) else -span
        high = 255 if dtype == torch.uint8 else min(span, torch.iinfo(dtype).max)
        low = max(low, torch.iinfo(dtype).min)

        def new(*shape):
            return torch.randint(low, high, shape, generator=self.make).to(dtype)

        how = self.below(5)
        if how == 0:
            return new(rows, columns + 3)[:, 2 : columns + 2]
        if how == 1:
            return new(columns, rows).t()
        if how == 2:
            return new(rows, 2 * columns)[:, ::2]
        if how == 3:
            return new(1, columns).expand(rows, columns)
        return new(rows, columns)

    def labels(self, tokens, ignored):
        """Beside tokens, in one of their shapes, of which some are not scored."""
        width = tokens.shape[1]
        columns = width - self.below(2)
        shift = self.below(3, -1)
        beside = tokens.long().roll(-shift, 1)[:, :columns].clone()
        beside[torch.rand(beside.shape, generator=self.make) < self.one_of(0.0, 0.3, 1.0)] = ignored
        beside[torch.rand(beside.shape, generator=self.make) < 0.2] += 1
        how = self.below(3)
        if how == 0:
            return torch.cat([beside, beside], 1)[:, :columns]
        return beside if how == 1 else beside.flatten()


def test_facts_of_any_batch_are_those_of_numpy(both_ways):
    seen = set()
    for seed in range(250):
        case = Cases(seed)
        rows, columns = case.one_of(1, 2, 4, 5, 16, 40), case.one_of(1, 4, 5, 6, 17, 64, 300, 700)
        tokens = case.integers(rows, columns, case.one_of(*DTYPES), case.one_of(3, 256, 2**62))
        if rows > 2 and case.below(2):
            tokens = tokens[torch.randint(rows, (rows,), generator=case.make)]
        kwargs = {}
        if case.below(2):
            kwargs["attention_mask"] = case.integers(rows, columns, case.one_of(*DTYPES), 2).abs()
        if case.below(3) == 0:
            kwargs["more"] = [torch.arange(case.one_of(rows, 3 * rows))[:: case.one_of(1, 2)], torch.tensor(7)]
        ignored = case.one_of(-100, 0, 2)
        targets = case.labels(tokens, ignored) if case.below(4) else tokens.flatten()[1:].long()
        first = bool(case.below(2))

        def look(t=tokens, k=kwargs, g=targets, i=ignored, f=first):
            return facts_of((t,), k, g if g.numel() else None, i, targets_first=f)

        library, numpy = both_ways(look)
        assert same(library, numpy), f"seed {seed}: {library} is not {numpy}"
        seen |= library.keys()
    assert {HASH, COPIES, CONCENTRATION, MASK, TARGETS, *SHARES} <= seen


def large(kind):
    span = torch.arange(4097 * 64)
    tokens = (span * span) % 50257
    return {
        "hashed in steps": tokens[: 300 * 300].view(300, 300),
        "hashed by its first row": tokens[: 300 * 300].view(300, 300).t(),
        "a long row": tokens[: 2**17].view(1, -1),
        "long rows apart": tokens.view(2, -1)[:, : 70000 * 2 - 9000],
        "as many rows as are compared": tokens[: 4096 * 64].view(4096, 64) % 3,
        "too many rows": tokens.view(4097, 64),
        "more tokens than are read": tokens[: 16 * 4096].view(16, 4096),
    }[kind]


@pytest.mark.parametrize(
    "kind",
    ["hashed in steps", "hashed by its first row", "a long row", "long rows apart", "as many rows as are compared", "too many rows", "more tokens than are read"],
)  # fmt: skip
def test_of_large_batches_both_read_the_same_part(both_ways, kind):
    tokens = large(kind)
    library, numpy = both_ways(lambda: facts_of((tokens,), targets=tokens.roll(-1, 1)))
    assert same(library, numpy)
    assert (COPIES in library) == (4 <= len(tokens) <= batch_facts.MAX_ROWS)


@pytest.mark.parametrize("without_it", [False, True])
def test_labels_are_one_less_than_their_tokens_in_a_batch_of_which_the_first_rows_are_read(monkeypatch, without_it):
    assert cpu_library.load() is not None
    if without_it:
        monkeypatch.setattr(cpu_library, "library", None)
    x = torch.arange(16 * 1025).view(16, 1025) % 250  # 7 rows of 1025 tokens are read, and there are 8 of 1024
    assert facts_of((x,), targets=x[:, 1:])[SHIFTS[1]] == 1.0


def test_what_the_library_does_not_read_is_read_by_numpy(both_ways):
    deep = torch.arange(4 * 8 * 5).view(4, 8, 5)
    library, numpy = both_ways(lambda: facts_of((deep, deep[0])), library_reads=False)
    assert same(library, numpy)
    apart = torch.arange(4 * 8 * 5).view(4, 8, 5).transpose(0, 2)
    library, numpy = both_ways(lambda: facts_of((deep[0],), targets=apart), library_reads=False)
    assert same(library, numpy)
    assert library[TARGETS] == 1 / apart.numel()


def test_a_tensor_without_memory_is_not_read():
    assert cpu_library.load() is not None
    nothing = torch._efficientzerotensor((8, 16), dtype=torch.int64)
    tokens = torch.arange(8 * 16).view(8, 16)
    assert cpu_batch.look_at_batch([tokens, nothing], batch_arithmetic.RULE, 8, 0, 8, -1) is None
    assert cpu_batch.count_scored(nothing, -100, concentrated=True) is None
    assert cpu_batch.count_shifts(tokens, nothing, 16, 8, -100) is None


def test_a_mask_of_other_dtypes_is_averaged_beside(both_ways):
    tokens = torch.arange(4 * 32).view(4, 32)
    for mask in (tokens < 96, (tokens < 96).to(torch.int8)):
        library, numpy = both_ways(lambda m=mask: facts_of((tokens,), {"attention_mask": m}))
        assert same(library, numpy)
        assert library[MASK] == 0.75
