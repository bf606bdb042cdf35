"""Run folders: identity, records, lease, recorded artifacts."""
