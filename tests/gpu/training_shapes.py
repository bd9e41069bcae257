"""Models of other kinds, and operands of every shape."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from training_loops import adamw, autocast, lm, loop, plain
from training_models import VOCAB, Conv, Encoder, Graph, Wide
from training_registry import BOTH, THREE, scenario
from training_run import Run

# ---- models


@scenario(THREE)
def tied_head(run: Run) -> None:
    """An embedding whose weight is the head's."""
    plain(run, lm(run, torch.bfloat16, tied=True))


@scenario(THREE)
def multihead_attention(run: Run) -> None:
    """`nn.MultiheadAttention` in `nn.TransformerEncoderLayer`s."""
    plain(run, Encoder(run.size(256, 64)).to(run.device, torch.bfloat16))


@scenario()
def flash_attention(run: Run) -> None:
    """torch's flash kernel, and no other."""
    model = lm(run, torch.bfloat16)

    def forward(*batch: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION if run.cuda else SDPBackend.MATH):
            out: Tensor = model(*batch)
        return out

    plain(run, model, forward)


@scenario()
def conv_channels_last(run: Run) -> None:
    """Convolutions and batch norm in channels_last under autocast."""
    width = run.size(64, 16)
    model = Conv(width).to(run.device).to(memory_format=torch.channels_last)
    run.attach(model)
    data = [
        (
            torch.randn(64, 3, 16, 16).to(run.device, memory_format=torch.channels_last),
            torch.randint(0, 16, (64,)).to(run.device),
        )
        for _ in range(4)
    ]
    loop(run, autocast(run, model), adamw(model), data)


@scenario(needs="torch_geometric")
def graph_network(run: Run) -> None:
    """torch-geometric: its Linears are not torch's."""
    dim = run.size(128, 32)
    model = Graph(dim).to(run.device)
    run.attach(model)
    x, edges, labels = torch.randn(500, dim), torch.randint(0, 500, (2, 3000)), torch.randint(0, 16, (500,))
    loop(run, model, adamw(model), [(x.to(run.device), edges.to(run.device), labels.to(run.device))])


class _Rows(torch.utils.data.Dataset[Tensor]):
    def __len__(self) -> int:
        return 4 * 64

    def __getitem__(self, i: int) -> Tensor:
        return torch.randint(0, VOCAB, (65,), generator=torch.Generator().manual_seed(i))


@scenario()
def dataloader(run: Run) -> None:
    """Two processes that load, pinned memory, copies that nobody waits for."""
    model = lm(run, torch.bfloat16)
    run.attach(model)
    optimizer = adamw(model)
    loader = torch.utils.data.DataLoader(_Rows(), batch_size=4, num_workers=2, pin_memory=run.cuda)
    steps = run.each()
    for _, rows in zip(steps, loader, strict=False):
        ids = rows.to(run.device, non_blocking=True)
        loss = model(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
        loss.backward()
        run.loss(loss)
        optimizer.step()
        optimizer.zero_grad()
    steps.close()  # type: ignore[attr-defined]
    run.ended = len(run.losses)


# ---- shapes


@scenario(THREE, steps=8, weight=2)
def long_shapes(run: Run) -> None:
    """8192 tokens of 4096 features."""
    n, d = run.size(8192, 256), run.size(4096, 128)
    model = Wide(d, run.size(11008, 344), d).to(run.device, torch.bfloat16)
    run.attach(model)
    data = [(torch.randn(n, d, device=run.device, dtype=torch.bfloat16),) for _ in range(2)]
    loop(run, model, torch.optim.SGD(model.parameters(), lr=1e-2), data)


@scenario(("defaults", "observe", "emulated", "current", "mxfp8", "nvfp4"), steps=12)
def ragged_shapes(run: Run) -> None:
    """1, 7, 129 and 300 rows; widths that are no multiple of 16 or 128."""
    model = Wide(100, 72, 130, 144, 17, 33).to(run.device, torch.bfloat16)
    run.attach(model)
    data = [(torch.randn(n, 100).to(run.device, torch.bfloat16),) for n in (1, 7, 129, 300)]
    loop(run, model, adamw(model), data)


@scenario(("defaults", "observe", "emulated", "current", "delayed", "rowwise"), steps=12)
def empty_batch(run: Run) -> None:
    """Batches without a row between others."""
    model = Wide(128, 256, 128).to(run.device, torch.bfloat16)
    run.attach(model)
    data = [(torch.randn(n, 128).to(run.device, torch.bfloat16),) for n in (64, 0, 32)]
    loop(run, model, adamw(model), data)


@scenario(BOTH)
def views_and_strides(run: Run) -> None:
    """Inputs that are transposed, sliced, expanded and of four dimensions; a frozen Linear; a Linear that is called twice."""
    first, frozen, twice = nn.Linear(128, 128), nn.Linear(128, 256).requires_grad_(False), nn.Linear(256, 256)
    model = nn.ModuleList([first, frozen, twice]).to(run.device, torch.bfloat16)
    run.attach(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    data = [torch.randn(128, 2, 9, 17).to(run.device, torch.bfloat16) for _ in range(3)]
    for i in run.each():
        x = first(data[i % 3].permute(3, 2, 1, 0))
        x = F.gelu(frozen(x[1:, ::2]))
        loss = twice(twice(x[:, :, :1].expand(-1, -1, 4, -1))).float().square().mean()
        loss.backward()
        run.loss(loss)
        optimizer.step()
        optimizer.zero_grad()
