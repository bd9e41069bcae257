"""Recipe objects of Transformer Engine: read by the names of their classes, as its quantisers would read them."""

from __future__ import annotations

import importlib.util
import sys
from enum import Enum
from types import SimpleNamespace

import pytest

from fp8watch.recipe import blockwise, current, delayed, mxfp8, nvfp4, resolve_recipe
from fp8watch.recipe.environment import FP32_SCALES_VARIABLE


class Format(Enum):
    E4M3 = 448
    HYBRID = 57344


def params(power_2_scale=False, amax_epsilon=0.0, **more):
    return SimpleNamespace(power_2_scale=power_2_scale, amax_epsilon=amax_epsilon, **more)


class Base:
    """As Transformer Engine's dataclasses: fields from the constructor, quantiser parameters from the class."""

    fp8_dpa = fp8_mha = False
    backward_override = None

    def __init__(self, **given):
        for name, value in given.items():
            if name in self.fields:  # the constructor ignores the rest in silence
                setattr(self, name, value)


class Float8BlockScaling(Base):
    fields = ("use_f32_scales", "fp8_format", "x_block_scaling_dim", "w_block_scaling_dim", "backward_override")
    use_f32_scales = False
    fp8_format = Format.E4M3
    fp8_quant_fwd_inp = fp8_quant_fwd_weight = fp8_quant_bwd_grad = params(True)
    x_block_scaling_dim, w_block_scaling_dim, grad_block_scaling_dim = 1, 2, 1


class Float8CurrentScaling(Base):
    fields = ("use_power_2_scales", "fp8_format")
    use_power_2_scales = False
    fp8_format = Format.HYBRID
    fp8_quant_fwd_inp = fp8_quant_fwd_weight = fp8_quant_bwd_grad = params(False)


class DelayedScaling(Base):
    fields = ("margin", "fp8_format", "amax_history_len", "amax_compute_algo", "scaling_factor_compute_algo", "fp8_dpa")
    margin, amax_history_len, amax_compute_algo = 0, 1024, "max"
    fp8_format = Format.HYBRID
    scaling_factor_compute_algo = None
    reduce_amax = True


class MXFP8BlockScaling(Base):
    fields = ("margin", "fp8_format", "enable_2d_quantization")
    margin, fp8_format, enable_2d_quantization = 0, Format.E4M3, False


class NVFP4BlockScaling(Base):
    """Its quantiser parameters are made by its constructor."""

    fields = (
        "disable_rht",
        "disable_stochastic_rounding",
        "disable_2d_quantization",
        "row_scaled_activation",
        "nvfp4_4over6",
    )
    disable_rht = disable_stochastic_rounding = disable_2d_quantization = row_scaled_activation = False
    nvfp4_4over6 = "none"

    def __init__(self, **given):
        super().__init__(**given)
        rht, square = not self.disable_rht, not self.disable_2d_quantization
        of = {"random_hadamard_transform": False, "stochastic_rounding": False, "fp4_2d_quantization": False}
        self.fp4_quant_fwd_inp = params(**of | {"random_hadamard_transform": rht})
        self.fp4_quant_fwd_weight = params(**of | {"fp4_2d_quantization": square})
        rounded = {"stochastic_rounding": not self.disable_stochastic_rounding}
        self.fp4_quant_bwd_grad = params(**of | {"random_hadamard_transform": rht} | rounded)


OFF = {"disable_rht": True, "disable_stochastic_rounding": True, "disable_2d_quantization": True}


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (Float8BlockScaling(), blockwise(environ={})),
        (Float8BlockScaling(fp8_format=Format.HYBRID), blockwise(environ={}, fp8_format="HYBRID")),
        (
            Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1),
            blockwise(environ={}, block_dims=(2, 1, 1)),
        ),
        (Float8CurrentScaling(), current(environ={})),
        (DelayedScaling(), delayed()),
        (
            DelayedScaling(margin=1, amax_history_len=16, amax_compute_algo="most_recent", fp8_format=Format.E4M3),
            delayed(margin=1, amax_history_len=16, amax_compute_algo="most_recent", fp8_format="E4M3"),
        ),
        (MXFP8BlockScaling(), mxfp8()),
        (MXFP8BlockScaling(fp8_format=Format.HYBRID), mxfp8(fp8_format="HYBRID")),
        (NVFP4BlockScaling(), nvfp4(environ={})),
        *((NVFP4BlockScaling(**{o: True}), nvfp4(environ={}, **{o: True})) for o in OFF),
        (NVFP4BlockScaling(**OFF), nvfp4(environ={}, **OFF)),
    ],
)
def test_objects_mean_what_their_names_mean(theirs, ours):
    made = resolve_recipe(theirs)
    assert made == ours
    assert made.fingerprint() == ours.fingerprint()
    assert made.declared_not_effective == ()


def test_subclasses_are_read_as_what_they_derive_from():
    class OurHouseRecipe(DelayedScaling):
        margin = 2

    assert resolve_recipe(OurHouseRecipe()) == delayed(margin=2)


def test_assigned_parameters_are_effective():
    theirs = Float8BlockScaling()
    theirs.fp8_quant_bwd_grad = params(False, 1e-12)
    made = resolve_recipe(theirs)
    assert (made.grad_output.power_2_scale, made.grad_output.eps) == (False, 1e-12)
    assert (made.input.power_2_scale, made.input.eps) == (True, 0.0)
    assert made.declared_not_effective == ()


def test_fp32_scales_in_the_constructor_are_declared_and_not_effective(attach, mlp, capsys):
    theirs = Float8BlockScaling(use_f32_scales=True, fp8_quant_fwd_inp=params(False))
    watch = attach(mlp, recipe=theirs)
    facts = watch._recorder.session.facts
    assert facts["input.power_2_scale"] is True  # what its quantisers would do is what is computed here
    assert watch._recorder.session.fingerprint == blockwise(environ={}).fingerprint()
    said = "Float8BlockScaling(use_f32_scales=True) is declared, the quantisers of input, weight, grad_output read"
    assert said in facts["declared_not_effective"]
    assert f"fp8watch: {said}" in capsys.readouterr().err


def test_power_of_two_scales_in_the_constructor_of_current_scaling_are_not_effective():
    made = resolve_recipe(Float8CurrentScaling(use_power_2_scales=True))
    assert not made.weight.power_2_scale
    assert "use_power_2_scales=True) is declared" in made.declared_not_effective[0]


def test_a_variable_that_the_object_does_not_follow_is_said():
    made = resolve_recipe(Float8BlockScaling(), environ={FP32_SCALES_VARIABLE: "1"})
    assert made.input.power_2_scale
    assert len(made.declared_not_effective) == 3
    assert made.declared_not_effective[1] == (
        f"{FP32_SCALES_VARIABLE}=1 is declared, Float8BlockScaling.fp8_quant_fwd_weight.power_2_scale=True is what its "
        "quantisers read; set the variable before Transformer Engine is imported, or assign "
        "recipe.fp8_quant_fwd_weight = QParams(power_2_scale=False, amax_epsilon=0)"
    )


def test_what_is_not_computed_here_is_said():
    theirs = MXFP8BlockScaling(margin=3)
    assert resolve_recipe(theirs).declared_not_effective == (
        "MXFP8BlockScaling.margin=3 is declared; MX quantisers ignore it",
    )
    assert "attention stays in high precision" in resolve_recipe(DelayedScaling(fp8_dpa=True)).declared_not_effective[0]
    theirs = Float8BlockScaling()
    theirs.fp8_quant_fwd_inp = params(True, stochastic_rounding=True)
    assert "stochastic_rounding=True is declared" in resolve_recipe(theirs).declared_not_effective[0]


class MXFP4QATMXFP8BlockScaling(MXFP8BlockScaling):
    pass


class CustomRecipe(Base):
    fields = ()


@pytest.mark.parametrize(
    ("theirs", "error", "says"),
    [
        (DelayedScaling(amax_compute_algo=max), ValueError, "amax_compute_algo=<function>"),
        (DelayedScaling(scaling_factor_compute_algo=max), ValueError, "scaling_factor_compute_algo=<function>"),
        (DelayedScaling(amax_history_len=0), ValueError, "amax_history_len=0"),
        (MXFP8BlockScaling(enable_2d_quantization=True), ValueError, "32×32"),
        (MXFP4QATMXFP8BlockScaling(), ValueError, "FP4"),
        (CustomRecipe(), ValueError, "function of its own"),
        (NVFP4BlockScaling(nvfp4_4over6="all"), ValueError, "nvfp4_4over6='all'): only 'none'"),
        (NVFP4BlockScaling(row_scaled_activation=True), ValueError, "row_scaled_activation=True): only False"),
        (Float8BlockScaling(backward_override="dequantized"), ValueError, "backward_override='dequantized'"),
        (Float8BlockScaling(w_block_scaling_dim=3), ValueError, "block dimension 3 of weight"),
        (SimpleNamespace(), TypeError, "must be a name"),
    ],
)
def test_what_cannot_be_computed_here_is_refused(theirs, error, says):
    with pytest.raises(error) as e:
        resolve_recipe(theirs)
    assert says in str(e.value)


def test_fp32_scales_of_an_object_are_refused_on_blackwell(monkeypatch):
    theirs = Float8BlockScaling()
    theirs.fp8_quant_fwd_inp = params(False)
    monkeypatch.setattr("fp8watch.recipe.foreign.capability", lambda: (10, 3))
    with pytest.raises(
        ValueError, match="fp8_quant_fwd_inp.power_2_scale=False: FP32 scales do not exist on Blackwell"
    ):
        resolve_recipe(theirs)


def test_reduced_amaxes_are_said_where_there_are_ranks_to_reduce_over(monkeypatch):
    monkeypatch.setattr("fp8watch.recipe.foreign._world_size", lambda: 8)
    assert "reduce_amax=True is declared" in resolve_recipe(DelayedScaling()).declared_not_effective[0]


def test_nothing_of_transformer_engine_is_imported():
    resolve_recipe(Float8BlockScaling())
    assert "transformer_engine" not in sys.modules or importlib.util.find_spec("transformer_engine") is not None
