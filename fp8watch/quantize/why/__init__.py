"""Why what a GEMM reads is not its operand: hypotheses, each tried on the operand itself, once a fault was found."""
