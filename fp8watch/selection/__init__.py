"""Which modules are taken over, which are left as they are, and what share of the GEMMs that is."""
