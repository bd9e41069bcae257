"""An imitation of Transformer Engine's Python surface, written for these tests: what fp8watch reads of it and no more.

Same names, same call order, same layouts, padding and refusals as versions 2.17 to 2.20 have for blockwise scaling and
mxfp8; the arithmetic of the former is fp8watch's own reference. It says nothing about how Transformer Engine computes.
`make test-te` runs the real Python packages.
"""

__version__ = "2.20.imitation"
