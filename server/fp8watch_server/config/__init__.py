"""What people write to configure a collector: values checked by msgspec, files of tables, errors with rule and remedy."""
