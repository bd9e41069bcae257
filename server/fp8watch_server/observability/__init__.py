"""Prometheus metrics and Grafana dashboards."""
