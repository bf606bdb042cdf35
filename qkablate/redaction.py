"""Keys and passwords: they stay where W&B and the Hub look for them, and reach nothing that is
written or told.
"""

import netrc
import os
import re
from collections.abc import Iterator
from pathlib import Path

_VARIABLES = ("WANDB_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "RAY_AUTH_TOKEN")
_SHORTEST = 8  # characters: `HF_TOKEN=x` is no key, and an x is everywhere
_SHAPES = (
    re.compile(r"()(?:hf_[A-Za-z0-9]{20,}|wandb_v1_\w{20,})"),
    # W&B's keys before that look like any hash: a name tells them apart. (`tokens=` has a number.)
    re.compile(
        r"(?i)((?:key|token(?!s\b)|secret|password)\w*[\"']?[\s=:]+[\"']?)(?:local-)?[0-9a-f]{40}"
    ),
    re.compile(r"(://)[^/\s@]*:[^/\s@]+(?=@)"),  # user:password@
)


def redacted(text: str) -> str:
    """The text with *** for every key and password."""
    for secret in _known():
        text = text.replace(secret, "***")
    for shape in _SHAPES:
        text = shape.sub(r"\1***", text)
    return text


def _known() -> list[str]:
    """Those of this user; what holds another comes first."""
    found = {secret for secret in _found() if len(secret) >= _SHORTEST}
    return sorted(found, key=len, reverse=True)


def _found() -> Iterator[str]:
    yield from (os.environ.get(name, "").strip() for name in _VARIABLES)
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    try:
        path = os.environ.get("HF_TOKEN_PATH") or f"{home}/token"
        yield Path(path).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, ValueError, RuntimeError):
        pass
    try:
        path = os.environ.get("NETRC") or "~/.netrc"
        yield from (entry[2] or "" for entry in netrc.netrc(Path(path).expanduser()).hosts.values())
    except (OSError, ValueError, RuntimeError, netrc.NetrcParseError):
        pass
