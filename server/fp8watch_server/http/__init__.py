"""Cross-cutting HTTP: server, connection limits, errors, logs, security headers."""
