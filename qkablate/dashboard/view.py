"""The W&B view of a sweep: its runs and the sections of panels, and how it is saved.

Curves come from the runs; gaps, verdicts and charts from the sweep's own W&B run, sweep-<id>, which
holds the output of `qkablate report`.
"""

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from qkablate.dashboard.panels import PanelFactory
from qkablate.disk import read_file
from qkablate.errors import UserError
from qkablate.redaction import redact
from qkablate.runs.records import read_config
from qkablate.sweeps.planning.manifest import Manifest
from qkablate.sweeps.running.state import SweepState
from qkablate.table import format_count
from qkablate.tracking.wandb.mode import probe_server, server_address_error

_MAX_LINES = 100  # of one panel, W&B's own bound
TIMEOUT_SECONDS = 10  # for each request; a server that fails is asked once more


def make_workspace(sweep_state: SweepState, entity: str, project: str) -> Any:
    """Return the wandb-workspaces workspace of a sweep, without network access.

    It shows the sweep's group of runs and those shared with older sweeps.
    """
    import wandb_workspaces.workspaces as ws
    from wandb_workspaces import expr

    manifest = sweep_state.manifest
    lines = min(_MAX_LINES, len(find_run_groups(manifest)) + 1)
    run_filter = f'Metric("Group") == {_quote(manifest.group)}'
    if shared := sorted(_find_shared_ids(sweep_state)):
        run_filter += f' or Metric("ID") in [{", ".join(map(_quote, shared))}]'
    groupby: list[Any] = [expr.Config("variant.name")]
    groupby += [] if is_grouped_by_variant(manifest) else [expr.Metric("JobType")]
    return ws.Workspace(
        entity=entity,
        project=project,
        name=manifest.folder.name.replace("+", "_"),  # W&B rejects + in names
        sections=make_sections(manifest, lines),
        settings=ws.WorkspaceSettings(max_runs=lines),
        runset_settings=ws.RunsetSettings(
            filters=run_filter,
            groupby=groupby,
            pinned_columns=[
                *("run:displayName", "run:jobType", "run:tags", "summary:final/status"),
                *("summary:final/test_loss", "summary:final/val_loss", "summary:params"),
                *("config:seed.value", "config:optim.value.lr"),
            ],
            # A pinned run is always fetched; this one holds the tables and charts.
            pinned_runs=[f"sweep-{manifest.id}"] if entity else [],
        ),
    )


def find_run_groups(manifest: Manifest) -> list[str]:
    """Return the groups of runs that differ only in their seed."""
    planned = manifest.arms if manifest.finals else ()  # at rates that are not known yet
    return list(dict.fromkeys([*map(manifest.run_group, manifest.runs), *planned]))


def is_grouped_by_variant(manifest: Manifest) -> bool:
    """Return whether the view groups runs by variant rather than by job type."""
    alone = len({arm.variant for arm in manifest.arms.values()}) == len(find_run_groups(manifest))
    return alone or manifest.tracking.job_type is not None


def mixes_arms(manifest: Manifest) -> bool:
    """Return whether a mean mixes arms because the user gave all of them one job type."""
    variants = {arm.variant for arm in manifest.arms.values()}
    return is_grouped_by_variant(manifest) and len(variants) < len(find_run_groups(manifest))


def _quote(text: str) -> str:
    """Quote a value of a filter; the library would also rewrite =, < and > inside values."""
    plain = (c if c.isascii() and (c.isalnum() or c in "-_") else f"\\U{ord(c):08x}" for c in text)
    return f'"{"".join(plain)}"'


def _find_shared_ids(sweep_state: SweepState) -> Iterator[str]:
    """Yield the W&B ids of the sweep's runs that belong to another group."""
    group = sweep_state.manifest.group
    line = f"\n  group: {group}\n".encode(errors="replace")
    for state in sweep_state.states.values():
        try:
            if line in read_file(state.folder / "config.yaml"):
                continue  # the usual case; parsing thousands of files takes seconds
            tracking = read_config(state.folder).get("tracking")
        except (OSError, ValueError):
            continue  # not started, or damaged
        if not isinstance(tracking, dict) or tracking.get("group") == group:
            continue
        attempt = (state.result or {}).get("attempt")
        yield f"{state.run.id}-{attempt if isinstance(attempt, int) else 1}"


def make_sections(manifest: Manifest, lines: int) -> list[Any]:
    """Return the sections in reading order; details are collapsed."""
    import wandb_workspaces.workspaces as ws

    factory = PanelFactory(
        [arm.config for arm in manifest.arms.values()], is_grouped_by_variant(manifest), lines
    )
    layout = ws.SectionLayoutSettings(columns=3, rows=3)
    return [
        ws.Section(
            name=name,
            panels=[*panels],
            is_open=opened,
            layout_settings=layout if len(panels) > 6 else ws.SectionLayoutSettings(columns=2),
        )
        for name, opened, panels in (
            ("Summary", True, factory.summary(_format_introduction(manifest))),
            ("Loss", True, factory.losses()),
            ("Gaps", True, factory.gaps()),
            ("Sizes", True, factory.sizes()),
            ("Learning rates", False, factory.rates()),
            ("QK circuit", False, factory.circuit("qk")),
            ("OV circuit", False, factory.circuit("ov")),
            ("Attention", False, factory.circuit("attention")),
            ("Speed and system", False, factory.speed()),
            ("Runs", False, factory.runs()),
        )
    ]


def _format_introduction(manifest: Manifest) -> str:
    many = len(find_run_groups(manifest))
    together = "variant" if is_grouped_by_variant(manifest) else "job type (arm and learning rate)"
    what = "and more: all arms have one job type" if mixes_arms(manifest) else "alone"
    return "\n\n".join(
        [
            f"**{manifest.name}-{manifest.id}**: {format_count(len(manifest.arms), 'arm')}",
            f"`{redact(shlex.join(manifest.command))}`",
            f"Lines are means by {together}, bands one standard deviation over seeds {what}. They"
            " are descriptive; estimates with intervals are in the tables and charts of the run"
            f" sweep-{manifest.id}.",
            "Runs that tune a learning rate have the tag `tuning`.",
            *[f"A panel draws {_MAX_LINES} of {many:,} means: filter the runs."]
            * (many > _MAX_LINES),
        ]
    )


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
