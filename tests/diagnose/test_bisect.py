"""The fewest layers and operands that must leave FP8 are named, in few trials, each in a process of its own."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from diagnose import bisect_cases

from fp8watch.diagnose import bisect_trial, command
from fp8watch.diagnose import bisection as bisect_room
from fp8watch.diagnose.bisect_search import fewest
from fp8watch.diagnose.bisection import TrialError, bisect

PAGE = Path(__file__).parents[2] / "docs" / "bisect.md"
CASES = "diagnose.bisect_cases:"
PLANTED = {
    "an_input": ("5.down.input",),
    "an_input_at_the_front": ("0.up.input",),
    "two_inputs": ("1.up.input", "6.down.input"),
    "a_gradient": ("3.up.grad_output",),
    "one_layer": ("3.up",),
    "only_together": ("2.up.input",),
    "losses_of_training": ("2.down.input",),
}


@pytest.fixture
def here(monkeypatch):
    """Trials run in this process: that they are processes of their own is the long test's."""
    monkeypatch.setenv("FP8WATCH_DISABLED", "stats")

    def process(self, request):
        return f"exit status {bisect_trial.main([str(request)])}"

    monkeypatch.setattr(bisect_room._Trials, "_process", process)


def asked_of(culprits, units, **how):
    asked = []

    def helps(leave):
        asked.append(leave)
        return culprits <= leave

    return fewest(units, helps, **how), asked


@pytest.mark.parametrize("ranked", [False, True])
def test_one_culprit_is_found_wherever_it_is_in_few_trials(ranked):
    for n in range(1, 70):
        units = [f"m{i}" for i in range(n)]
        for culprit in units:
            found, asked = asked_of({culprit}, units, ranked=ranked)
            assert found == [culprit]
            assert len(asked) + 2 <= 2 * math.log2(n) + 5, (n, culprit)
            assert len(set(asked)) == len(asked)


def test_a_good_ranking_costs_two_trials():
    found, asked = asked_of({"m0"}, [f"m{i}" for i in range(512)], ranked=True)
    assert found == ["m0"]
    assert len(asked) <= 2


def test_several_culprits_are_found_and_nothing_else():
    units = [f"m{i}" for i in range(12)]
    for culprits in itertools.chain(itertools.combinations(units, 2), itertools.combinations(units, 3)):
        for ranked in (False, True):
            found, _ = asked_of(set(culprits), units, ranked=ranked)
            assert set(found) == set(culprits)


LONG = ("an_input_at_the_front", "losses_of_training")


@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.long if c in LONG else ()) for c in PLANTED])
def test_a_planted_culprit_is_named_with_its_operand(here, case):
    found = bisect(f"{CASES}{case}", limit=0.1)
    assert found.verdict == "fp8"
    assert found.culprits == PLANTED[case]
    assert len(found.modules) == 2 * bisect_cases.BLOCKS
    assert len(found.trials) <= 2 * math.log2(len(found.modules)) + 5
    row = re.search(rf"^\| `{case}` \|.*\| ([^|]*) \| (\d+) \|$", PAGE.read_text(), re.M)
    assert (case in LONG) is (row is None)
    assert row is None or (row[1], int(row[2])) == (", ".join(found.culprits), len(found.trials))
    for name in found.culprits:
        assert name in str(found)


def test_what_fp8_does_not_explain_is_said(here):
    shared = bisect(f"{CASES}shared")
    assert (shared.verdict, shared.culprits, len(shared.trials)) == ("shared", (), 2)
    assert "FP8 is not the cause" in str(shared)
    sound = bisect(f"{CASES}sound")
    assert (sound.verdict, len(sound.trials)) == ("not-reproduced", 1)


def test_a_training_that_raises_has_failed(here):
    found = bisect(f"{CASES}raises", operands=False, ranking=["4.up"])
    assert found.culprits == ("4.up",)
    assert "FloatingPointError: loss is nan" in found.trials[0].said
    assert len(found.trials) <= 4


FLAGS_AND_LOSSES = ["a_flag_of_torch", "a_flag_of_numpy", "flags_of_ranks", "losses_of_numpy", "an_array_of_losses"]


@pytest.mark.parametrize("case", [*FLAGS_AND_LOSSES, "losses_while_it_trains"])
def test_flags_and_losses_are_taken_as_torch_and_numpy_give_them(here, case):
    found = bisect(f"{CASES}{case}", operands=False, ranking=["4.up"])
    assert (found.verdict, found.culprits) == ("fp8", ("4.up",))


@pytest.mark.parametrize(
    ("result", "limit", "failed"),
    [
        (False, None, False),
        (torch.tensor(False), None, False),
        (np.array([False, False]), None, False),
        ([False, True], None, True),
        ((False, [1.0, 9.0]), 8, True),
        ((False, [1.0, 2.0]), 8, False),
        ((True, [1.0]), None, True),
        (torch.tensor(math.inf, dtype=torch.bfloat16), None, True),
        (np.float32(3.0), 2, True),
        (np.int64(1), 2, False),
        (2, None, False),
        (iter([1.0, np.float64("nan")]), None, True),
        (None, None, None),
        ([], None, None),
        (torch.empty(0), None, None),
    ],
)
def test_what_a_function_may_return(result, limit, failed):
    assert bisect_trial.judged(result, limit)[0] is failed


@pytest.mark.parametrize("result", ["nan", b"1", {"loss": 1.0}, [None, 1.0], 1j, object()])
def test_what_is_neither_a_flag_nor_a_loss_is_refused(result):
    with pytest.raises(TypeError, match="must be True, False, a loss, or losses in order"):
        bisect_trial.judged(result, None)


@pytest.mark.parametrize(
    ("case", "word"),
    [
        ("forgets_to_return", "None"),
        ("no_losses", "no losses"),
        ("returns_a_word", "str"),
        ("misnames", "lsos"),
        ("misses_a_file", "no/such/checkpoint"),
        ("is_out_of_memory", "out of memory"),
        ("is_out_of_host_memory", "allocate memory"),
        ("no_such_function", "no_such_function"),
    ],
)
def test_what_says_nothing_of_the_training_is_no_failure(here, tmp_path, case, word):
    state = tmp_path / "state.json"
    with pytest.raises(TrialError, match=f"without a result .*{word}"):
        bisect(f"{CASES}{case}", state=state)
    assert not state.exists() or all(not t["leave"] for t in json.loads(state.read_text())["trials"])


def test_of_ranks_those_without_losses_leave_the_word_to_the_others(here, monkeypatch):
    said = {0: [], 1: [2.0]}

    def ranks(self, request):
        for rank, result in said.items():
            monkeypatch.setenv("RANK", str(rank))
            monkeypatch.setattr(bisect_cases, "sound", lambda trial, r=result: (bisect_cases._attached(trial), r)[1])
            bisect_trial.main([str(request)])
        return "exit status 0"

    monkeypatch.setattr(bisect_room._Trials, "_process", ranks)
    found = bisect(f"{CASES}sound", nproc=2)
    assert (found.verdict, found.trials[0].said) == ("not-reproduced", "1 loss, the last 2")
    said[1] = "a word"
    with pytest.raises(TrialError, match="str"):
        bisect(f"{CASES}sound", nproc=2)


def test_an_interrupted_bisection_goes_on_where_it_was(here, tmp_path, capsys):
    state = tmp_path / "state.json"

    class Interrupted(Exception):
        pass

    def stop(_trial, num):
        if num == 4:
            raise Interrupted

    with pytest.raises(Interrupted):
        bisect(bisect_cases.an_input, state=state, on_progress=stop)
    before = json.loads(state.read_text())["trials"]
    assert len(before) == 4
    found = bisect(bisect_cases.an_input, state=state)
    after = json.loads(state.read_text())["trials"]
    assert after[:4] == before
    assert len(after) == len(found.trials)
    with pytest.raises(ValueError, match=r"is of limit=None, not 3\.0"):
        bisect(bisect_cases.an_input, state=state, limit=3.0)
    assert command.main(["bisect", f"{CASES}an_input", "--state", str(state)]) == 0
    said = capsys.readouterr()
    assert "With 5.down.input in high precision it does not fail" in said.out
    assert "trial 1: nothing in high precision: fails" in said.err
    assert command.main(["bisect", "nowhere"]) == 2


@pytest.mark.parametrize(
    ("option", "file", "word"),
    [
        ("--state", "none/s.json", "state="),
        ("--state", ".", "state="),
        ("--svg", "none/s.svg", "there is no folder"),
        ("--svg", ".", "is a folder"),
    ],
)
def test_what_cannot_be_written_is_said_before_the_first_trial(here, tmp_path, capsys, option, file, word):
    assert command.main(["bisect", f"{CASES}an_input", option, str(tmp_path / file)]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("fp8watch diagnose bisect: ")
    assert word in said.err
    assert str(tmp_path) in said.err
    assert said.err.count("\n") == 1
    assert "trial" not in said.err.replace(str(tmp_path), "")


@pytest.mark.parametrize(
    ("option", "value", "word"),
    [
        ("--limit", "nan", "limit=nan"),
        ("--timeout", "0", "timeout_s=0.0: must be above 0"),
        ("--timeout", "nan", "above 0"),
    ],
)
def test_a_number_that_cannot_be_meant_is_refused(capsys, option, value, word):
    assert command.main(["bisect", f"{CASES}sound", option, value]) == 2
    said = capsys.readouterr().err
    assert word in said
    assert said.count("\n") == 1


def test_an_error_of_files_ends_with_two_and_is_traced_where_asked(here, tmp_path, monkeypatch, capsys):
    asked = ["bisect", f"{CASES}sound", "--state", str(tmp_path / "s.json"), "--svg", str(tmp_path / "s.svg")]

    def full(*_args, **_more):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(bisect_room.tempfile, "TemporaryDirectory", full)
        assert command.main(asked) == 2
        with pytest.raises(OSError, match="No space left"):
            command.main([*asked, "--traceback"])
    with monkeypatch.context() as broken:
        broken.setattr(Path, "write_text", lambda self, *a, **k: full() if self.suffix == ".svg" else 0)
        broken.setattr(bisect_room._Trials, "_save", lambda self: None)
        broken.setattr(bisect_room._Trials, "_run", lambda self, leave: bisect_room.TrialResult((), False, "sound"))
        assert command.main(asked) == 2
    said = capsys.readouterr()
    assert said.err.count("fp8watch diagnose bisect: [Errno 28] No space left on device") == 2
    assert "It does not fail (sound)" in said.out  # what was found is not lost with its picture


def test_a_trial_without_a_result_is_no_result(here, monkeypatch):
    with pytest.raises(TrialError, match="took no module to FP8"):
        bisect(f"{CASES}never_attaches")
    monkeypatch.setattr(bisect_room._Trials, "_process", lambda self, request: "exit status -9")
    with pytest.raises(TrialError, match=r"without a result \(exit status -9\)"):
        bisect(f"{CASES}sound")


@pytest.mark.long
def test_trials_are_processes_of_their_own_and_under_torchrun_a_rank_that_fails_counts(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    found = bisect(f"{CASES}on_ranks", nproc=2, ranking=["7.up"], operands=False)
    assert found.culprits == ("7.up",)
    assert len(found.trials) == 3
    with pytest.raises(TrialError, match="without a result"):
        bisect(f"{CASES}sound", timeout_s=0.05)
