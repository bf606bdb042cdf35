"""Reports of the analysis: an HTML page, charts as files, Markdown."""
