"""Finding what changed without a copy of what was there before."""
