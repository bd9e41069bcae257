"""Mixtral of transformers whose experts compute in FP8, sharded by FSDP2 or replicated by DDP and checkpointed: on two ranks
they compute what they compute on one."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from support.ranks import run_ranks

SCRIPT = textwrap.dedent(
    """
    import sys, warnings, torch, torch.distributed as dist, fp8watch.session.start
    warnings.simplefilter("ignore")  # of other people's packages
    sys.path.insert(0, sys.argv[1])
    from attach.conftest import Kept
    from stacks.family_models import FAMILIES
    from support import sharded_experts
    fp8watch.session.start.Recorder = Kept
    dist.init_process_group("gloo")
    how, recipe, order, reentrant = sys.argv[2:6]

    def subject(family):
        def make(checkpointed):
            model = family.make().train()
            if checkpointed:
                model.gradient_checkpointing_enable({"use_reentrant": reentrant == "reentrant"})
            return model

        def blocks(model):
            layers = model.model.layers
            return [block for layer in layers for block in (layer.mlp.experts, layer)]

        return sharded_experts.Subject(make, lambda model, batch: family.loss(model, 10 * batch[0] + batch[1]), blocks)

    for family in FAMILIES:
        if family.name in sys.argv[6:]:
            print("RESULT", sharded_experts.compare(subject(family), how, recipe, before=order == "before"), flush=True)
    dist.destroy_process_group()
    """
)


@pytest.mark.parametrize(
    ("how", "recipe", "order", "reentrant", "other"),
    [
        ("fsdp", "blockwise", "before", "no", "Mixtral, experts one by one"),
        ("fsdp", "mxfp8", "after", "reentrant", "gpt-oss"),
        ("ddp", "blockwise", "after", "reentrant", "Mixtral, experts gathered"),
        ("ddp", "mxfp8", "before", "no", "gpt-oss"),
    ],
)
def test_experts_of_a_family_compute_on_ranks_what_they_compute_alone(
    tmp_path, how, recipe, order, reentrant, other
) -> None:
    folder = str(Path(__file__).parents[1])
    for out in run_ranks(tmp_path, SCRIPT, folder, how, recipe, order, reentrant, "Mixtral", other):
        lines = [line for line in out.splitlines() if line.startswith("RESULT")]
        alike = "RESULT {'losses': True, 'experts in FP8': True, 'experts': True, 'statistics': True, 'told': True}"
        assert lines == [alike] * 2
