"""Publishing: what is of the author's machine alone stays there."""

import dataclasses

import pytest

from qkablate.analysis.publication.publish import without_folders
from qkablate.config import Config


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (["out=/home/me/out", "tracking.entity=me", "data.cache=/home/me/cache"], []),
        (["/home/me/mine.yaml"], ["mine.yaml"]),
        (["--from", "/home/me/shared/"], ["--from", "shared"]),
        (["--from=../shared"], ["--from=shared"]),
        (["data.path=/texts/corpus.txt", "data.name=org/set"],) * 2,
        (["--more", "8", "scale=small"],) * 2,
    ],
)
def test_folders_of_the_author_are_not_published(words, kept):
    config = dataclasses.asdict(Config())
    config["out"], config["data"]["cache"] = "/home/me/out", "/home/me/cache"
    arm = {"config": config, "overrides": {"out": "/home/me/out", "optim.lr": "1"}}
    command = ["qkablate", "claim", "run", *words]
    manifest = {"sha256": "", "arms": {"a": arm}, "command": command, "out": "/home/me/out"}
    published = without_folders(manifest)
    assert published["command"] == ["qkablate", "claim", "run", *kept]
    assert "/home/me" not in str(published)
    assert arm["overrides"] == {"optim.lr": "1"}
