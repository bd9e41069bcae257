"""What people ask a collector from a terminal: runs, incidents, one of them, two side by side, a report."""
