"""Over which ranks Transformer Engine reduces amax, as its modules hold it: two processes of a gloo group."""

import importlib
import multiprocessing
import os

import pytest
import torch
from watched import FEATURES, TOKENS, Watched

from fp8watch_agent.amax_group import AMAX_RANKS_FACT


def train(te, rank, folder, options, results):
    """One rank: what was told of it, and the scale of its input in each step."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    alone = [torch.distributed.new_group([r]) for r in range(2)]
    recipe = importlib.import_module("transformer_engine.common.recipe").DelayedScaling(
        amax_history_len=4, reduce_amax=options != "not reduced"
    )
    torch.manual_seed(1)
    watch = Watched(te, torch.nn.Sequential(te.Linear(FEATURES, FEATURES, params_dtype=torch.bfloat16)))
    torch.manual_seed(10 + rank)
    scales = []
    for _ in range(4):
        x = torch.randn(TOKENS, FEATURES, dtype=torch.bfloat16, requires_grad=True) * (1 + rank)
        with te.fp8_autocast(enabled=True, fp8_recipe=recipe, fp8_group=alone[rank] if options == "alone" else None):
            y = watch.model(x)
        y.float().square().mean().backward()
        watch.observer.end_step()
        scales.append(float(watch.seen["0", "input", "rowwise"][-1][1].scale_inv.max()))
    results.put((rank, watch.said, scales, dict(watch.guard.errors)))
    results.close()
    results.join_thread()
    torch.distributed.destroy_process_group()
    os._exit(0)


@pytest.mark.parametrize(("options", "said"), [("reduced", "0-1"), ("alone", None), ("not reduced", None)])
def test_ranks_of_a_group_say_so_and_have_one_scale(te, tmp_path, options, said):
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    ranks = [context.Process(target=train, args=(te, r, tmp_path, options, results)) for r in range(2)]
    for rank in ranks:
        rank.start()
    told, scales = {}, {}
    for _ in ranks:
        rank, lines, scales[rank], errors = results.get(timeout=100)
        told[rank] = [facts for _, facts in lines]
        assert errors == {}
    for rank in ranks:
        rank.join(20)
    assert told == {r: [{AMAX_RANKS_FACT: said}] if said else [] for r in range(2)}
    assert scales[0][0] == scales[1][0] == 1.0  # nobody has an amax yet
    assert (scales[0][1:] == scales[1][1:]) is (said is not None)
