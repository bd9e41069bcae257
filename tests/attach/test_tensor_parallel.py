"""Linears whose weights tensor parallelism shards: each rank's GEMMs are observed, and no number changes."""

from __future__ import annotations

import json
import textwrap

import pytest
from support.ranks import run_ranks

SCRIPT = textwrap.dedent(
    """
    import json, sys, torch, torch.distributed as dist, fp8watch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))

    class Mlp(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down, self.last = nn.Linear(64, 96), nn.Linear(96, 64), nn.Linear(64, 64)

        def forward(self, x):
            return self.last(self.down(torch.relu(self.up(x)))).pow(2).mean()

    def run(recipe, inf=False):
        torch.manual_seed(0)
        model, watch = Mlp(), None
        parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if recipe:
            watch = fp8watch.attach(model, recipe=recipe, filter_fn=lambda _, fqn: fqn != "last", overhead_budget=None)
        if inf:
            with torch.no_grad():
                model.up.weight.to_local()[5, 7] = float("inf")
        optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
        torch.manual_seed(1)
        for _ in range(1 if inf else 3):
            loss = model(torch.randn(32, 64))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        return losses, watch, model

    class Kept:
        rows, sites = {}, {}
    import fp8watch.session.start as start
    Recorder = start.Recorder
    class Keeping(Recorder):
        def register_sites(self, sites):
            Kept.sites.update((s.id, s) for s in sites)
            super().register_sites(sites)
        def record_step(self, header, ids, rows, *rest, **more):
            Kept.rows = {int(i): rows[k].copy() for k, i in enumerate(ids)}
            super().record_step(header, ids, rows, *rest, **more)
    start.Recorder = Keeping

    alone, _, plain = run("")
    losses, watch, model = run(sys.argv[1])
    whole = all(torch.equal(a.to_local() if hasattr(a, "to_local") else a, b.to_local() if hasattr(b, "to_local") else b)
                for a, b in zip(plain.parameters(), model.parameters()))
    seen = {}
    for i, row in Kept.rows.items():
        s = Kept.sites[i]
        if s.recipe != "probe":
            seen[f"{s.module}.{s.operand}.{s.direction}"] = [int(row["num_elements"]), s.recipe]
    facts, summary = watch._recorder._session.facts, watch.summary()
    watch.detach()
    _, watch, _ = run(sys.argv[1], inf=True)
    up = [r for i, r in Kept.rows.items() if Kept.sites[i].module == "up" and Kept.sites[i].operand == "weight"]
    print("RESULT" + json.dumps([losses == alone and whole, summary["num_steps"], summary["internal_errors"],
          facts["gemm_flops_observed"], facts["left_out"], seen, [list(map(int, r["first_nonfinite"][:2])) for r in up]]), flush=True)
    watch.detach()
    dist.destroy_process_group()
    """
)


@pytest.mark.parametrize("recipe", ["observe", "blockwise"])
def test_each_rank_observes_its_part_and_no_number_changes(tmp_path, recipe):
    for out in run_ranks(tmp_path, SCRIPT, recipe):
        (line,) = [line for line in out.splitlines() if line.startswith("RESULT")]
        same, steps, errors, observed, left_out, seen, nonfinite = json.loads(line.removeprefix("RESULT"))
        assert (same, steps, errors) == (True, 3, {})
        # of the wide one a rank has 48 outputs, of the other as many inputs
        expected = {"up.input": 32 * 64, "up.weight": 48 * 64, "up.grad_output": 32 * 48}
        expected |= {"down.input": 32 * 48, "down.weight": 64 * 48, "down.grad_output": 32 * 64}
        assert {name.rpartition(".")[0]: n for name, (n, _) in seen.items()} == expected
        assert len(seen) == 9  # the first has no dgrad
        assert {how for _, how in seen.values()} == {"observe"}
        assert observed == pytest.approx(2 * 96 / (2 * 96 + 64), abs=1e-3)
        assert ("up (DTensor weight (tensor parallel): computes as before)" in left_out) == (recipe == "blockwise")
        assert nonfinite == [[5, 7]]
