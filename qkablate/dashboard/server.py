"""A saved view in W&B, through wandb-workspaces: as data, and on a server."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from qkablate.errors import UserError
from qkablate.redaction import redacted
from qkablate.tracking.wandb.mode import silence_of, wrong_server

ANSWER_SECONDS = 10  # for each request; a server that fails is asked once more


@dataclass(frozen=True)
class Saved:
    """A view on a server."""

    url: str
    is_new: bool
    lost: str | None  # where there was one before


@dataclass(frozen=True)
class Server:
    """One that answers, and knows the key."""

    app_url: str
    entity: str  # where no other is named


def content(view: Any) -> dict[str, Any]:
    """What would be sent to a server, with ids that are the same every time. The library has no
    public name for it, so that this function alone knows the private one.
    """
    sent: dict[str, Any] = view._to_model().model_dump(by_alias=True, exclude_none=True)
    for number, section in enumerate(sent["spec"]["section"]["panelBankConfig"]["sections"]):
        for place, panel in enumerate(section["panels"]):
            panel["__id__"] = f"{number}-{place}"
    return {key: value for key, value in sent.items() if value != ""}


def connect() -> Server:
    """UserError where W&B's server is not there, or does not know the key."""
    import wandb

    if wrong := wrong_server():
        raise UserError(f"{wrong}; --spec FILE needs no server")
    settings = wandb.Settings(
        silent=True,
        x_graphql_retry_max=1,
        x_graphql_timeout_seconds=ANSWER_SECONDS,
    )
    kept = wandb.setup(settings).settings
    if silence := silence_of(kept.base_url):
        raise UserError(f"W&B: {silence}; --spec FILE needs no server")
    try:
        entity = wandb.Api(timeout=ANSWER_SECONDS).default_entity
    except Exception as error:
        raise refused(error) from None
    return Server(kept.app_url, entity or "")


def save(view: Any, app_url: str, known: Iterable[str]) -> Saved:
    """Save it: in the place of the one that is known in this project, if that is still there."""
    server = urlsplit(app_url)
    own = re.escape(f"{server.scheme}://{server.netloc}/{view.entity}/{view.project}?nw=")
    before = next((url for url in known if re.fullmatch(own + "[a-z0-9]+", url)), None)
    try:
        there = _found(view, before) if before else None
        saved = (there or view).save()
    except Exception as error:
        raise refused(error) from None
    return Saved(saved.url, is_new=there is None, lost=None if there else before)


def _found(view: Any, url: str) -> Any:
    """The view at the address, with what this one holds; None where it is gone, or has become
    something that the library does not read.
    """
    try:
        there = type(view).from_url(url)
    except (ValueError, LookupError, TypeError, AttributeError):
        return None
    for part in ("name", "sections", "settings", "runset_settings"):
        setattr(there, part, getattr(view, part))
    return there


def refused(error: Exception) -> UserError:
    """What W&B said, in one line."""
    said = str(error).strip().partition("\n")[0] or type(error).__name__
    return UserError(f"W&B: the view is not saved: {redacted(said)}")


def urls(content: Any) -> list[str]:
    """Those that a dashboard.json holds."""
    found = content.get("views") if isinstance(content, Mapping) else None
    return [url for url in found if isinstance(url, str)] if isinstance(found, list) else []
