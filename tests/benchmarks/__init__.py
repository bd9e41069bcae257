"""Benchmarks, each a program; a package, so that no other of this name that somebody installs comes before it."""
