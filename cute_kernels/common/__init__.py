"""Device-side CuTe helpers shared by the families: row geometry, bulk-copy ring, ordered row sums."""
