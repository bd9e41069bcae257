"""`fp8watch worker`: takes batches out of the queue and commits them."""
