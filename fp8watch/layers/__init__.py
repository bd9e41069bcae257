"""The GEMMs of a Linear in FP8, the custom ops they run through, and the hooks around them."""
