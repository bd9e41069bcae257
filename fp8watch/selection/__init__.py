"""Module selection: which Linears run in FP8, which are left out and why, and their share of the GEMM FLOPs."""
