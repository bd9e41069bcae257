"""Where batches and registrations come in."""
