"""A spool or a report shown without a collector that runs."""
