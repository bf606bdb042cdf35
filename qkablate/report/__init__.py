"""What the analysis found, for the eye: one page, pictures, markdown, all from the same specs."""
