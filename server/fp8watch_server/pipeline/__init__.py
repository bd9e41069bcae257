"""From committed batches to incidents: the worker between detection and storage, and its restart."""
