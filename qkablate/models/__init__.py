"""Models, the catalogue of variants, cost and generation."""
