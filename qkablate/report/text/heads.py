"""Print heads in a terminal: tables of metrics, spectra, attention weights."""

from typing import Any

from qkablate.errors import sanitize
from qkablate.table import print_table

_BARS = "▁▂▃▄▅▆▇█"
_LISTED = 8  # singular values that are written out


def print_measures(
    measures: dict[str, list[Any]], shown: list[tuple[int, int]], places: list[str] | None = None
) -> None:
    """Print a table with one row per head; empty measures and spectra are left out.

    The `places` of the layers in the model are shown, too, if given.
    """
    is_empty = {name: all(heads is None for heads in layers) for name, layers in measures.items()}
    names = [name for name in measures if name != "singular" and not is_empty[name]]
    rows = []
    for layer, head in shown:
        by_name = [measures[name][layer] for name in names]
        values = [None if heads is None else heads[head] for heads in by_name]
        place = [] if places is None else [places[layer]]
        rows.append([str(layer), *place, str(head), *map(format_number, values)])
    columns = ["layer", *([] if places is None else ["site"]), "head"]
    print_table([*columns, *names], rows, left=0, keys=len(columns))


def format_number(value: float | None) -> str:
    """Format with two or three significant digits."""
    if value is None:
        return "–"
    if 0 < abs(value) < 5e-4:
        return f"{value:.0e}"
    places = 3 if abs(value) < 1 else 2 if abs(value) < 100 else 0
    return f"{value:z.{places}f}"


def print_spectra(singular: list[Any], shown: list[tuple[int, int]]) -> None:
    """Print the singular values of heads, with a sparkline each."""
    print("\nsingular values (bars relative to the largest)")
    for layer, head in shown:
        values = [] if singular[layer] is None else singular[layer][head]
        values = [value for value in values if value is not None]  # fewer in a narrow layer
        listed = ", ".join(f"{value:.3g}" for value in values[:_LISTED])
        rest = f", … {values[-1]:.3g}" if len(values) > _LISTED else ""
        print(f"  L{layer} H{head}  {sparkline(values)}  {listed}{rest}")


def sparkline(values: list[float]) -> str:
    """Return one bar per value, of eight heights."""
    largest = max(values, default=0) or 1
    return "".join(_BARS[min(7, int(8 * value / largest))] for value in values)


def print_attention(
    weights_TS: list[list[float | None]], queries: list[str], keys: list[str], *, causal: bool
) -> None:
    """Print the three largest attention weights of each query."""
    queries, keys = ([sanitize(repr(token)) for token in tokens] for tokens in (queries, keys))
    rows = []
    for query, weights in enumerate(weights_TS):
        visible = range(query + 1 if causal else len(keys))
        order = sorted(visible, key=lambda j: -(weights[j] or 0))[:3]
        largest = [f"{keys[j]} at {j}: {format_number(weights[j])}" for j in order]
        rows.append([str(query), queries[query], *(largest + [""] * 3)[:3]])
    print_table(["at", "token", "1st", "2nd", "3rd"], rows, left=5)
