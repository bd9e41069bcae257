"""Detectors that tell several modes apart: one question, and the mode is its answer. Modes with a detector of their own have
it in their folder."""
