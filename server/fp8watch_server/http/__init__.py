"""What every HTTP answer has in common: errors, limits, logs, headers."""
