"""Bugs in what attach does by default: hashes, roles, and what is looked at in high precision."""

from __future__ import annotations

from support.planted import Bug

A = "tests/attach"
_MESH = f"{A}/test_mesh.py::test_four_ranks_find_their_coordinates_without_a_collective"
_STAGES = f"{A}/test_pipeline_stages.py::test_what_stages_run_for_shapes_is_not_observed_and_no_scale_remembers_it"
_FSDP1 = f"{A}/test_ranks.py::test_what_fsdp1_has_sharded_counts_by_its_full_shape"
DEFAULT_BUGS = [
    Bug("layers that are added are said", "replaced_modules:ReplacedModules.look", "if not gone and not added:", "if not gone:",
        "tests/attach/test_added_layers.py::test_layers_that_are_added_are_said_once_and_lower_the_observed_share"),
    Bug("a layer that is replaced is not added", "replaced_modules:ReplacedModules._added", "linears - before - gone", "linears - gone",
        "tests/attach/test_added_layers.py::test_a_layer_that_is_replaced_is_not_said_to_be_added"),
    Bug("a mask of pruned weights is no other gradient", "gradient_arrival:GradientArrival.before", "torch.where(_is_pruned(got, expected, weight, gradient.dtype), 0.0, apart)", "apart",
        "tests/attach/test_gradient_arrival.py::test_a_mask_of_pruned_weights_is_no_other_gradient_and_another_mask_is"),
    Bug("a mask of other elements is another gradient", "gradient_arrival:_is_pruned", "(((weight == 0) == gone) | (expected == 0)).all() & alike", "alike",
        "tests/attach/test_gradient_arrival.py::test_a_mask_of_pruned_weights_is_no_other_gradient_and_another_mask_is"),
    Bug("that no step ended stays said at the end", "watch:Watch._close", "if self._stuck and status is not StepStatus.ABORTED:", "if self._stuck:",
        "tests/attach/test_step_owner.py::test_that_no_step_ended_stays_said_when_training_is_over"),
    Bug("a dimension of a mesh without a known name is known by what it shards", "mesh:_of_meshes", " or does.get(dimension)", "", _MESH),
    Bug("a dimension along which one weight is sharded is that of its parts", "mesh:_meshes",
        '"" if place.is_replicate()', '"dp" if place.is_replicate()', _MESH),
    Bug("weights are hashed in their turn", "observation_plan:ObservationPlan._hash",
        "step.sample.hashes[row] and ", "",
        f"{A}/test_weight_hash.py::test_weights_are_hashed_as_the_gemm_reads_them_in_their_steps"),
    Bug("by default weights are hashed in 32 steps", "sampling_schedule",
        "HASH_EVERY_STEPS = 32", "HASH_EVERY_STEPS = 33",
        f"{A}/test_weight_hash.py::test_by_default_every_weight_is_hashed_within_any_32_steps"),
    Bug("embeddings are called so by transformers too", "fp8watch_agent.roles",
        "|embed_(?:tokens|positions|in)", "", f"{A}/test_roles.py::test_embeddings_are_told_by_the_names_that_models_give_them"),
    Bug("heads and embeddings of other classes are looked at", "probes:_keeps_precision",
        "role_of(fqn) in (ROUTER, OUTPUT_HEAD, EMBEDDING)", "role_of(fqn) == ROUTER",
        f"{A}/test_roles.py::test_heads_and_embeddings_of_classes_of_their_own_are_looked_at_by_default"),
    Bug("a lookup of a class of its own is no GEMM", "flop_coverage:coverage",
        " or (head and _looks_up(fqn, module))", "",
        f"{A}/test_roles.py::test_an_embedding_of_another_class_is_a_gemm_only_where_it_may_be_the_head"),
    Bug("what a stage runs for shapes is no training", "shape_inference:_wrap", "with nothing_counts():", "if nothing_counts:", _STAGES),
    Bug("the backward that a stage runs for shapes is none", "shape_inference", ', "_prepare_backward_infra")', ",)", _STAGES),
    Bug("stages of pipelines are given back", "shape_inference:wrap_shape_inference", "            back()", "            pass", _STAGES),
    Bug("what FSDP1 has sharded counts by its full shape", "flop_coverage:coverage", "full.get(id(p)) or _shape(p) for", "_shape(p) for", _FSDP1),
    Bug("a convolution that FSDP1 has sharded is named", "flop_coverage:_weights_of", "full.get(id(p)) or ", "", _FSDP1),
    Bug("a Linear whose parameters FSDP1 took counts", "flop_coverage:coverage", "if not size and", "if False and", _FSDP1),
    Bug("an embedding without a head may be one", "flop_coverage:coverage",
        "(head and _looks_up(fqn, module))", "_looks_up(fqn, module)",
        f"{A}/test_roles.py::test_an_embedding_of_another_class_is_a_gemm_only_where_it_may_be_the_head"),
    Bug("an adapter of an embedding is no head", "tied_heads:_readers",
        "if path and name != fqn:", "if path:", f"{A}/test_tied_heads.py::test_an_adapter_around_an_embedding_is_no_head"),
]  # fmt: skip
