"""Per-tensor scaling equals the oracle bit by bit; delayed scales follow the amax of earlier passes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from quantize import oracle
from quantize.operands import DTYPES, KINDS, case, operand
from recipes.oracles import Delayed
from torch.utils._python_dispatch import TorchDispatchMode

from fp8watch.numerics.formats import FORMATS
from fp8watch.quantize import DelayedScale, quantize_per_tensor
from fp8watch.recipe import AmaxHistory

INF, NAN = float("inf"), float("nan")


def same(got: torch.Tensor, expected: np.ndarray) -> None:
    ours = got.numpy()
    assert ((ours.view(np.int32) == expected.view(np.int32)) | (np.isnan(ours) & np.isnan(expected))).all()


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("power_2", [False, True])
def test_current_scaling_equals_the_oracle(fmt: str, power_2: bool) -> None:
    for kind, dtype in itertools.product(KINDS, DTYPES):
        with case(kind, dtype):
            compare(kind, dtype, fmt, power_2)


def compare(kind: str, dtype: str, fmt: str, power_2: bool) -> None:
    x = operand(kind, dtype, (9, 131))
    want = oracle.quantize(x.float().numpy(), (9, 131), fmt, power_2, 0.0, dtype)
    got = quantize_per_tensor(x, fmt, power_2_scale=power_2)
    assert np.array_equal(got.data.view(torch.uint8).numpy(), want.codes)
    same(got.scale_inv, want.scale_inv)
    same(got.dequantize(), want.dequantized)
    assert got.stats.amax.shape == (1, 1)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("scale", [1.0, 3e-3, 77.7, 1e30])
@pytest.mark.parametrize("kind", ["normal", "outliers", "nan-and-inf", "zeros"])
def test_a_delayed_scale_clips_what_lies_above_it(kind: str, scale: float, fmt: str) -> None:
    x = operand(kind, "float32", (9, 131))
    given_scale = torch.full((1, 1), scale)
    want = oracle.quantize(x.numpy(), (9, 131), fmt, False, 0.0, "float32", given_scale.numpy())
    got = quantize_per_tensor(x, fmt, scale=given_scale)
    assert np.array_equal(got.data.view(torch.uint8).numpy(), want.codes)
    same(got.dequantize(), want.dequantized)
    counted = oracle.sketch(want, fmt, False, 0.0)
    summary = got.stats.summary()
    assert summary["num_saturated"] == counted["num_saturated"]
    assert summary["num_underflow"] == counted["num_underflow"]
    assert summary["num_off_scale_tiles"] == 0  # its scale is bound to no invariant
    if kind == "outliers":
        depth = np.float32(np.abs(x.numpy()).max()) * np.float32(scale) / np.float32(oracle.LARGEST[fmt])
        assert summary["scale_ratio_max"] == pytest.approx(float(depth), rel=1e-6)


passes = st.lists(
    st.lists(
        st.one_of(
            st.floats(2.0**-20, 2.0**20, width=32),
            st.sampled_from([0.0, 1e-45, 3e38, INF, NAN]),
        ),
        min_size=1,
        max_size=3,
    ),
    min_size=1,
    max_size=12,
)


@given(passes, st.sampled_from([1, 2, 5, 1024]), st.sampled_from(["max", "most_recent"]), st.integers(-2, 2))
def test_a_history_of_any_passes_gives_the_oracles_scales(
    story: list[list[float]], length: int, algo: str, margin: int
) -> None:
    ours = DelayedScale(FORMATS["E4M3"], AmaxHistory(length, algo, margin))
    judge = Delayed("E4M3", length, algo, margin)
    for calls in story:
        for amax in calls:
            x = np.array([[amax, -amax / 2, 0.0]], np.float32)
            judge.call(x)
            t = torch.from_numpy(x)
            ours.record(t.abs().nan_to_num(0.0, posinf=INF).max(), t.isnan().sum())
        judge.end_of_pass()
        ours.roll()
        assert float(ours.scale) == float(judge.scale)


def test_the_history_is_laid_out_as_transformer_engine_does() -> None:
    state = DelayedScale(FORMATS["E4M3"], AmaxHistory(4))
    for amax in (1.0, 2.0, 3.0, 4.0, 5.0):
        state.record(torch.tensor(amax))
        state.roll()
    # entry 0 is the pass that runs, the last one the pass before; 1.0 and 2.0 have left
    assert state.amax_history.tolist() == [0.0, 3.0, 4.0, 5.0]


def test_one_nan_freezes_the_scale_as_long_as_the_history_remembers_it() -> None:
    state = DelayedScale(FORMATS["E4M3"], AmaxHistory(3))
    seen = []
    for i in range(6):
        state.record(torch.tensor(2.0 ** -(i + 1)), torch.tensor(int(i == 1)))
        state.roll()
        seen.append(float(state.scale))
    assert seen == [896.0, 896.0, 896.0, 896.0, 448 * 2**3, 448 * 2**4]


def test_record_and_roll_read_nothing_back_and_keep_their_addresses() -> None:
    seen = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.add(str(func))
            return func(*args, **(kwargs or {}))

    state = DelayedScale(FORMATS["E5M2"], AmaxHistory())
    amax, nan = torch.tensor([[3.0]]), torch.tensor([[0]])
    before = state.scale.data_ptr(), state.amax_history.data_ptr()
    with Watch():
        for _ in range(3):
            state.record(amax, nan)
            state.roll()
    assert (state.scale.data_ptr(), state.amax_history.data_ptr()) == before
    assert seen
    assert not [name for name in seen if "_local_scalar_dense" in name or "nonzero" in name or "equal" in name]


def test_a_state_is_kept_and_loaded() -> None:
    state, other = (DelayedScale(FORMATS["E4M3"], AmaxHistory(8)) for _ in "ab")
    state.record(torch.tensor(7.0))
    state.roll()
    other.load_state_dict(state.state_dict())
    assert torch.equal(other.scale, state.scale)
    assert torch.equal(other.amax_history, state.amax_history)
    with pytest.raises(ValueError, match="amax_history is \\(8,\\): must have shape \\(4,\\)"):
        DelayedScale(FORMATS["E4M3"], AmaxHistory(4)).load_state_dict(state.state_dict())


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"scale": torch.ones(1)}, ValueError, "scale has shape (1,): must be (1, 1)"),
        ({"scale": 2.0}, TypeError, "scale is float"),
        ({"fp8_format": "E3M4"}, ValueError, "fp8_format='E3M4'"),
        ({"amax_epsilon": -1}, ValueError, "amax_epsilon=-1"),
        ({"backend": "fpga"}, ValueError, "backend='fpga'"),
    ],
)
def test_what_cannot_work_is_refused(arguments, error, says) -> None:
    with pytest.raises(error) as e:
        quantize_per_tensor(torch.ones(2, 2), **arguments)
    assert says in str(e.value)
