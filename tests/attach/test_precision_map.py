"""The precision map: what is kept in which precision besides the GEMMs, as facts of the session."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fp8watch.session.precision_map import precision_facts


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(128), nn.Linear(128, 256)

    def forward(self, x):
        return self.up(self.norm(x)).square().mean()


def test_a_watched_training_tells_it_once(attach):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    watch = attach(model)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(16, 128)).backward()
        optimizer.step()
    facts = {k: v for k, v in watch._recorder.facts.items() if k.startswith("precision.")}
    assert facts == {
        "precision.parameters": "float32",
        "precision.norms": "float32",
        "precision.gradients": "float32",
        "precision.optimizer moments": "exp_avg float32; exp_avg_sq float32",
        "precision.master weights": "the parameters themselves, float32",
        "precision.cached for backward": "inputs of 1 Linear as FP8 codes with their scales",
    }
    assert not watch.guard.errors


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(128, 384)

    def forward(self, x):
        q, k, v = self.qkv(x).view(2, 16, 3, 2, 64).permute(2, 0, 3, 1, 4).unbind()
        return nn.functional.scaled_dot_product_attention(q, k, v).sum()


@pytest.mark.parametrize("autocast", [False, True])
def test_what_attention_is_handed_has_a_row(attach, autocast):
    model = nn.Sequential(Attention())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = attach(model)
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(torch.randn(2, 16, 128))
        loss.backward()
        optimizer.step()
    handed = "bfloat16 under autocast to bfloat16" if autocast else "float32"
    assert watch._recorder.facts["precision.attention"] == f"{handed} in 1 module"
    assert not watch.guard.errors


def test_low_precision_is_named_and_what_is_not_seen_has_no_row():
    model = Net()
    model.up.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    assert precision_facts(model, [optimizer]) == {
        "precision.parameters": "bfloat16 99.2 %, float32 0.769 %",
        "precision.norms": "float32",
    }
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    model.up.weight.main_grad = torch.zeros(256, 128)
    optimizer.step()
    for p, state in optimizer.state.items():
        state["master_param"] = p.detach().float()
    found = precision_facts(model, [optimizer])
    assert found["precision.gradients"] == "float32 99.2 %, bfloat16 0.769 %"
    assert found["precision.master weights"] == "float32"
    assert found["precision.optimizer moments"].startswith("exp_avg bfloat16 99.2 %, float32")
    for state in optimizer.state.values():
        del state["master_param"]
    without = precision_facts(model, [optimizer])["precision.master weights"]
    assert without == "none seen in the optimizer; the parameters are bfloat16, float32"


def test_the_all_reduce_of_ddp_is_named(tmp_path):
    def halves(_state, bucket):
        raise AssertionError

    store = f"file://{tmp_path / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(Net())
        said = [precision_facts(wrapped, [])["precision.communication"]]
        wrapped.register_comm_hook(None, halves)
        said.append(precision_facts(wrapped, [])["precision.communication"])
    finally:
        torch.distributed.destroy_process_group()
    assert said == ["DDP all-reduce in the gradients' dtype", "DDP all-reduce by halves"]
