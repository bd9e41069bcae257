"""What everything else computes with: formats, checks of operands, statistics of tiles. Imports nothing of ours."""
