"""Codes and scales in the layout of something else: chunks that are swizzled for another width of a row, scales of the copy in the other
direction.

Statistics are sound; the GEMM reads something else. Severity is the relative error of what it reads.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from proving.faults._base import one_of
from proving.faults._kernel import KernelFault, is_shared
from proving.faults._sites import Operand, per_element
from proving.training import Training
from torch import Tensor

_CHUNK = 16
"""Bytes that change places together."""


class SwizzleOfOtherWidth(KernelFault):
    """Chunks of 16 bytes are laid into shared memory crosswise, each row otherwise, and are taken out by the pattern of another width: of
    128 bytes where the rows have 64, or 32, or of none (DeepGEMM #434: a pattern of 128 that holds for one head size alone; tilelang
    #224). No code is lost, no scale is another one, and each row has the amax that it had."""

    name = "swizzle-of-other-width"
    widths: ClassVar[tuple[int, ...]] = (1, 2, 4, 8)
    """In chunks: none, 32, 64 and 128 bytes."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.race = False  # a matter of the layout and not of the moment
        self.drawn.pop("race")
        self.narrower = int(self.rng.integers(1, 4))

    @staticmethod
    def pattern(rows: Tensor, width: int) -> Tensor:
        """What the number of a chunk is XORed with, of each row, where patterns are `width` chunks wide."""
        return rows // (8 // width) % width

    def read(self, codes: Tensor, columnwise: bool) -> Tensor:
        """Codes [M, K] as they come out."""
        if columnwise:
            return self.read(codes.t(), False).t()
        num_rows, num_columns = codes.shape
        written = max((w for w in self.widths if w * _CHUNK <= num_columns), default=1)
        taken = self.widths[max(0, self.widths.index(written) - self.narrower)]
        self.note(written=_CHUNK * written, taken=_CHUNK * taken)
        num_whole = (
            num_columns // (written * _CHUNK) * written
        )  # what is left behind the last whole pattern lies as it is
        rows, chunks = torch.arange(num_rows)[:, None], torch.arange(num_whole)[None]
        crosswise = self.pattern(rows, written) ^ self.pattern(rows, taken)
        source = chunks // written * written + (chunks % written ^ crosswise)
        whole = codes[:, : num_whole * _CHUNK].unflatten(1, (-1, _CHUNK))
        out = whole.gather(1, source[..., None].expand(-1, -1, _CHUNK)).flatten(1)
        return torch.cat((out, codes[:, out.shape[1] :]), 1)

    def wrong(self, name: str, operand: Operand) -> Tensor:
        return operand.values(self.read(operand.codes, operand.columnwise))


class ScalesOfOtherDirection(KernelFault):
    """Two copies have two sets of scales, and the columnwise codes are read with the rowwise ones: each element with the scale of the tile
    that it has in its row (of CUDALibrarySamples #248 the scales of A and B had changed places). Where rows and columns are of like size,
    only some tiles are off by an octave or two."""

    name = "scales-of-other-direction"
    operands = ("input", "grad_output")
    directions = ((True,),)

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> KernelFault | None:
        return None if is_shared(training, one_of(rng, cls.operands)) else super().draw(rng, training, severity)

    def wrong(self, name: str, operand: Operand) -> Tensor:
        other = operand.job.transposed()
        scale_inv = operand.sound.quantize(operand.x, other)[1]
        rows, columns = operand.codes.shape
        codes = operand.codes.view(operand.job.fmt.dtype).float()
        return codes * per_element(scale_inv, other.tile)[:rows, :columns]
