"""The page of the study, made from the published runs."""
