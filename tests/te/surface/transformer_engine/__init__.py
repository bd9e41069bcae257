"""An imitation of Transformer Engine's Python surface, written for these tests: what fp8watch reads of it and no more.

Same names, same call order, same layouts and padding as versions 2.8 to 2.20 have for blockwise scaling; the arithmetic
is fp8watch's own reference. It says nothing about how Transformer Engine computes.
"""

__version__ = "2.20.imitation"
