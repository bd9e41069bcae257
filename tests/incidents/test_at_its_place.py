"""A consequence that is one only at the place of its cause, how long a cause answers, and how far back a rare look reaches."""

from __future__ import annotations

import pytest
from incidents.findings import DOWN, OTHER, finding, modes, put
from incidents.store import RUN, TENANT, Store

from fp8watch_server.db.dialect import writing
from fp8watch_server.incidents.fold import fold

Q, K, ELSEWHERE = "layers.0.attn.q_proj", "layers.0.attn.k_proj", "layers.1.attn.q_proj"


@pytest.mark.parametrize("cause", ["frozen-scale", "delayed-clip"])
def test_logits_follow_a_scale_that_is_wrong_in_their_own_attention_and_in_no_other(store: Store, cause: str) -> None:
    put(store, finding(store, cause, 100, K, severity="critical"))
    put(store, finding(store, "attention-logit-growth", 104, Q))
    assert modes(store) == [cause]
    put(store, finding(store, "attention-logit-growth", 105, ELSEWHERE))
    assert modes(store) == [cause, "attention-logit-growth"]


@pytest.mark.parametrize("cause", ["outlier-growth", "attention-logit-growth"])
def test_a_scale_falls_where_the_amax_that_it_follows_grows(store: Store, cause: str) -> None:
    put(store, finding(store, cause, 100, Q))
    put(store, finding(store, "scale-collapse", 110, Q))
    assert modes(store) == [cause]
    put(store, finding(store, "scale-collapse", 111, DOWN))
    assert modes(store) == [cause, "scale-collapse"]


def test_what_names_no_place_follows_no_cause_at_one(store: Store) -> None:
    put(store, finding(store, "outlier-growth", 100, Q))
    put(store, finding(store, "scale-collapse", 110, Q, sites=[]))
    assert modes(store) == ["scale-collapse"]  # which may be of the whole run, and explains one site that grew


def test_what_was_explained_and_stays_broken_keeps_its_cause_open(store: Store) -> None:
    put(
        store,
        finding(store, "silent-data-corruption", 100, octaves=100.0, first=True, not_before=100, severity="critical"),
    )
    for step in range(100, 130):
        put(store, finding(store, "nan-in-activation", step, OTHER, severity="critical"))
    [incident] = store.incidents
    assert (incident["mode"], incident["last_step"]) == ("silent-data-corruption", 129)
    put(store, finding(store, "nan-in-activation", 150, OTHER, severity="critical"))
    assert modes(store) == ["silent-data-corruption", "nan-in-activation"]


@pytest.mark.parametrize("mode", ["kernel-output-fault", "silent-data-corruption"])
def test_a_fault_that_is_seen_in_rare_samples_does_not_reach_back_over_their_distance(store: Store, mode: str) -> None:
    for step in range(79, 128):
        put(store, finding(store, "optimizer-divergence", step, began=79))
    put(store, finding(store, mode, 127, OTHER, stride=20, not_before=122, severity="critical"))
    assert modes(store) == ["optimizer-divergence", mode]


def test_what_comes_again_while_its_incident_is_kept_open_is_of_it(store: Store) -> None:
    for step in (10, 60):
        with writing(store.db) as conn:
            found = [finding(store, "delayed-clip", step)]
            fold(conn, RUN, TENANT, 1, found, store.run.facts, store.now, after_clean_steps=100)
    assert [(i["first_step"], i["last_step"]) for i in store.incidents] == [(10, 60)]


@pytest.mark.parametrize(("onset", "named"), [(110, OTHER), (120, DOWN)])
def test_what_fades_is_named_where_it_comes_first_in_data_flow(store: Store, onset: int, named: str) -> None:
    put(store, finding(store, "dying-tile", 108, DOWN, began=107))
    for step in range(109, onset + 2):
        put(store, finding(store, "dying-tile", step, DOWN, began=107))
    put(store, finding(store, "dying-tile", onset + 1, OTHER, began=onset))
    [incident] = store.incidents
    assert (incident["place"]["module"], incident["first_step"]) == (named, 107)
