"""What a terminal shows of heads: tables of measures, spectra, what a token looks at."""

from typing import Any

from qkablate.errors import printable
from qkablate.table import print_table

_BARS = "▁▂▃▄▅▆▇█"
_LISTED = 8  # singular values that are written out


def print_measures(found: dict[str, list[Any]], shown: list[tuple[int, int]]) -> None:
    """A row a head; measures that no layer has, and spectra, are left out."""
    names = [
        name
        for name, layers in found.items()
        if name != "singular" and any(heads is not None for heads in layers)
    ]
    rows = []
    for layer, head in shown:
        of_layers = [found[name][layer] for name in names]
        values = [None if heads is None else heads[head] for heads in of_layers]
        rows.append([str(layer), str(head), *map(number, values)])
    print_table(["layer", "head", *names], rows, left=0)


def number(value: float | None) -> str:
    """Two or three digits are what one compares."""
    if value is None:
        return "–"
    if 0 < abs(value) < 5e-4:
        return f"{value:.0e}"
    places = 3 if abs(value) < 1 else 2 if abs(value) < 100 else 0
    return f"{value:z.{places}f}"


def print_spectra(singular: list[Any], shown: list[tuple[int, int]]) -> None:
    print("\nsingular values, the bars as parts of the largest")
    for layer, head in shown:
        values = [] if singular[layer] is None else singular[layer][head]
        listed = ", ".join(f"{value:.3g}" for value in values[:_LISTED])
        rest = f", … {values[-1]:.3g}" if len(values) > _LISTED else ""
        print(f"  L{layer} H{head}  {sparkline(values)}  {listed}{rest}")


def sparkline(values: list[float]) -> str:
    """A bar for each value, of eight heights."""
    largest = max(values, default=0) or 1
    return "".join(_BARS[min(7, int(8 * value / largest))] for value in values)


def print_looks(text: dict[str, Any], layer: int, head: int) -> None:
    """Of each token, the three that it looks at most."""
    print(f"\nWhat each token looks at, layer {layer}, head {head}")
    tokens = [printable(repr(token)) for token in text["tokens"]]
    rows = []
    for here, weights in enumerate(text["attention"][layer][head]):
        order = sorted(range(here + 1), key=lambda j: -(weights[j] or 0))[:3]
        seen = [f"{tokens[j]} at {j}: {number(weights[j])}" for j in order]
        rows.append([str(here), tokens[here], *(seen + [""] * 3)[:3]])
    print_table(["at", "token", "most", "then", "then"], rows, left=5)
