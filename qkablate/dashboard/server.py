"""A saved view in W&B, through wandb-workspaces: as data, and on a server."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from qkablate.errors import UserError
from qkablate.redaction import redact
from qkablate.tracking.wandb.mode import probe_server, server_address_error

TIMEOUT_SECONDS = 10  # for each request; a server that fails is asked once more


@dataclass(frozen=True)
class SavedView:
    """A view on a server."""

    url: str
    is_new: bool
    lost: str | None  # where there was one before


def view_content(view: Any) -> dict[str, Any]:
    """Return the request body of a view, with reproducible ids.

    The library has no public function for it; only this one uses the private method.
    """
    sent: dict[str, Any] = view._to_model().model_dump(by_alias=True, exclude_none=True)
    for number, section in enumerate(sent["spec"]["section"]["panelBankConfig"]["sections"]):
        for index, panel in enumerate(section["panels"]):
            panel["__id__"] = f"{number}-{index}"
    return {key: value for key, value in sent.items() if value != ""}


def connect() -> tuple[str, str]:
    """Return the address of the W&B server's app, and the key's owner or an empty string.

    Raise UserError if the server is unreachable or rejects the key.
    """
    import wandb

    if wrong := server_address_error():
        raise UserError(f"{wrong}; --spec FILE needs no server")
    settings = wandb.Settings(
        silent=True, x_graphql_retry_max=1, x_graphql_timeout_seconds=TIMEOUT_SECONDS
    )
    kept = wandb.setup(settings).settings
    if silence := probe_server(kept.base_url):
        raise UserError(f"W&B: {silence}; --spec FILE needs no server")
    try:
        entity = wandb.Api(timeout=TIMEOUT_SECONDS).default_entity
    except Exception as error:
        raise make_save_error(error) from None
    return kept.app_url, entity or ""


def save_view(view: Any, app_url: str, known: Iterable[str]) -> SavedView:
    """Save a view, replacing the known one of this project if it still exists."""
    server = urlsplit(app_url)
    prefix = re.escape(f"{server.scheme}://{server.netloc}/{view.entity}/{view.project}?nw=")
    before = next((url for url in known if re.fullmatch(prefix + "[a-z0-9]+", url)), None)
    try:
        loaded = _load_view(view, before) if before else None
        saved = (loaded or view).save()
    except Exception as error:
        raise make_save_error(error) from None
    return SavedView(saved.url, is_new=loaded is None, lost=None if loaded else before)


def _load_view(view: Any, url: str) -> Any:
    """Load the view at a URL with the content of this one; None if it is gone or unreadable."""
    try:
        loaded = type(view).from_url(url)
    except (ValueError, LookupError, TypeError, AttributeError):
        return None
    for part in ("name", "sections", "settings", "runset_settings"):
        setattr(loaded, part, getattr(view, part))
    return loaded


def make_save_error(error: Exception) -> UserError:
    """Return W&B's error as one line."""
    text = str(error).strip().partition("\n")[0] or type(error).__name__
    return UserError(f"W&B: the view is not saved: {redact(text)}")


def find_urls(content: Any) -> list[str]:
    """Return the URLs in the content of a dashboard.json."""
    urls = content.get("views") if isinstance(content, Mapping) else None
    return [url for url in urls if isinstance(url, str)] if isinstance(urls, list) else []
