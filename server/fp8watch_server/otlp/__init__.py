"""OTLP over HTTP: the client that metrics and incidents share."""
