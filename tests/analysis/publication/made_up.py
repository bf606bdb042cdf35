"""Archives of made-up runs."""

from qkablate.analysis.publication.archive import Archive

HASH = "0123456789abcdef" * 4


def make_run(loss, seed=1, **fields):
    result = {"status": "done", "loss": {"val": loss, "test": loss + 0.5}, "steps": 8, "empty": {}}
    changes = {"seed": seed, "optim.lr": 0.001}
    return {
        "arm": "no_q-d16",
        "tuning": False,
        "changes": changes,
        "environment": None,
        "result": result | fields,
    }


def make_archive(runs, registered="2026-01-01", **fields):
    registration = {"claim": {"name": "mine", "scale": "small"}, "hash": HASH}
    look = {"manifest": {"name": "claim-mine", "id": "aa", "arms": {}}, "solo": None}
    return Archive(registration | {"registered": registered}, {"3": look}, runs=runs, **fields)
