"""`fp8watch shards`: where runs lie, and moves of runs between databases."""
