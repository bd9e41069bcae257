"""Two runs side by side: where they part, and how they differ."""
