"""What a step leaves of each site: one slab row, its tile maps, the copy to the host."""
