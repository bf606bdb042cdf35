"""Published runs: archives of claims, and whether others agree with them."""
