"""What other tools read: metrics for Prometheus, dashboards for Grafana."""
