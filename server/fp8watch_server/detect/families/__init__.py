"""Detectors that tell several modes apart: they ask one question, and the mode is its answer.

What broke first in a step (`nonfinite`, with `degenerate`, `kernel_output` and `unobserved`), which scale rounding does not
explain (`invariant`), what ranks must have in common (`agreement`): these the engine asks by itself. Whether a scale from
history is late or stands still (`delayed`), what makes one layer grow (`outlier`), why the loss jumps (`loss`): these are
asked over the roll-up, in the order of `fp8watch_server.detect.precedence`. A detector of one mode lies in its folder.
"""
