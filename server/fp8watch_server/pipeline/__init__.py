"""From committed batches to incidents: detect worker, priority lane, restart and replay."""
