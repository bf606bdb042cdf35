"""Removal of keys and passwords from everything that is written or printed."""

import netrc
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_VARIABLES = ("WANDB_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "RAY_AUTH_TOKEN")
_MIN_LENGTH = 8  # characters: the x of `HF_TOKEN=x` occurs everywhere
_PATTERNS = (
    re.compile(r"()(?:hf_[A-Za-z0-9]{20,}|wandb_v1_\w{20,})"),
    # Older keys of W&B look like any hash, so the name before counts. (`tokens=` has a number.)
    re.compile(
        r"(?i)((?:key|token(?!s\b)|secret|password)\w*[\"']?[\s=:]+[\"']?)(?:local-)?[0-9a-f]{40}"
    ),
    re.compile(r"(://)[^/\s@]*:[^/\s@]+(?=@)"),  # user:password@
)


def redact(text: str) -> str:
    """Return the text with *** for every key and password."""
    secrets = {secret for secret in _user_secrets() if len(secret) >= _MIN_LENGTH}
    for secret in sorted(secrets, key=len, reverse=True):  # one may contain another
        text = text.replace(secret, "***")
    for pattern in _PATTERNS:
        text = pattern.sub(r"\1***", text)
    return text


def _user_secrets() -> Iterator[str]:
    yield from (os.environ.get(name, "").strip() for name in _VARIABLES)
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    with suppress(OSError, ValueError, RuntimeError):
        path = os.environ.get("HF_TOKEN_PATH") or f"{home}/token"
        yield Path(path).expanduser().read_text(encoding="utf-8").strip()
    with suppress(OSError, ValueError, RuntimeError, netrc.NetrcParseError):
        path = os.environ.get("NETRC") or "~/.netrc"
        yield from (entry[2] or "" for entry in netrc.netrc(Path(path).expanduser()).hosts.values())
