"""The benchmark: ceilings, every row of figures, and the peers, in one run."""
