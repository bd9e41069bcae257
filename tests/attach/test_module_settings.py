"""Numbers that modules hold as settings are told by class, and are the same for the same model."""

from __future__ import annotations

import pytest
import torch
from attach.conftest import Mlp
from torch import nn

from fp8watch.session.module_settings import settings_of
from fp8watch_agent.module_settings import MAX_CHARS, SETTINGS_FACT, decode_settings, encode_settings


class Rotary(nn.Module):
    def __init__(self, base=10000.0):
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / base ** (torch.arange(0, 64, 2).float() / 64), persistent=False)
        self.register_buffer("kept", torch.ones(3))
        self.register_buffer("ids", torch.arange(4), persistent=False)


class Adapter(nn.Module):
    def __init__(self, scaling=2.0, layer=0):
        super().__init__()
        self.scaling, self.names = {"default": scaling}, {"default": "a"}
        self.layer, self.on, self.name, self._cache, self.start_time = layer, True, "x", 0.25, 1.7e9


class Drop(nn.Module):
    def __init__(self, drop_prob):
        super().__init__()
        self.drop_prob = drop_prob


def named(*modules):
    return nn.ModuleList(modules).named_modules()


def test_numbers_are_told_by_class_and_attribute():
    got = settings_of(
        named(nn.LayerNorm(4), nn.Dropout(0.1), nn.Dropout(0), nn.LayerNorm(4, eps=1e-6), Adapter(), Adapter(layer=1))
    )
    assert got == {"LayerNorm.eps": "1e-06, 1e-05", "Dropout.p": "0, 0.1", "Adapter.scaling[default]": "2"}


def test_many_values_are_counted_and_told_apart():
    rates = [0.01 * i for i in range(24)]
    (text,) = settings_of(named(*map(Drop, rates))).values()
    assert text.startswith("24 values from 0 to 0.23 (")
    assert settings_of(named(*map(Drop, rates))) == {"Drop.drop_prob": text}
    assert settings_of(named(*map(Drop, [*rates[:5], 0.055, *rates[6:]]))) != {"Drop.drop_prob": text}


@pytest.mark.parametrize("change", [lambda m: m.bfloat16(), lambda m: m.inv_freq[3].mul_(1.001), lambda m: Rotary(5e5)])
def test_a_table_that_no_checkpoint_holds_is_told_with_its_ends(change):
    before = settings_of(named(Rotary()))
    assert list(before) == ["Rotary.inv_freq"]
    assert before["Rotary.inv_freq"].startswith("32 × float32, 1 … 0.000133352 (")
    assert settings_of(named(Rotary())) == before
    model = Rotary()
    assert (
        settings_of(named(change(model) if isinstance(change(Rotary()), nn.Module) else (change(model), model)[1]))
        != before
    )


def test_what_has_no_values_is_not_read():
    with torch.device("meta"):
        model = Rotary()
    assert settings_of(named(model)) == {}


def test_a_session_has_them_and_swapped_classes_keep_their_names(attach):
    model = Mlp()
    model.drop = nn.Dropout(0.25)
    facts = attach(model)._recorder.session.facts
    assert decode_settings(facts[SETTINGS_FACT]) == {"Dropout.p": "0.25"}
    model.up.scaling = 2.0  # of our class by now
    assert settings_of(model.named_modules()) == {"Dropout.p": "0.25", "Linear.scaling": "2"}


def test_the_fact_is_bounded_and_holds_whole_entries():
    settings = {f"Class{i:04}.eps": f"{i}.5" for i in range(1000)}
    fact = encode_settings(settings)
    assert len(fact) <= MAX_CHARS
    assert decode_settings(fact).items() <= settings.items()
    assert len(decode_settings(fact)) > 100
    assert decode_settings(encode_settings({"a": "1; 2", "b": "3, 4"})) == {"b": "3, 4"}
    assert decode_settings(None) == decode_settings("") == {}
