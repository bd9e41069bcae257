"""Batches between the collectors that accept them and the workers that commit them: NATS JetStream."""
