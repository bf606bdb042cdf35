"""Tables of how well the variants of the catalogue can represent a model."""

import shlex
from collections.abc import Mapping
from typing import Any

from qkablate.report.section import Section
from qkablate.report.text.table import Table
from qkablate.table import format_list, print_table, print_text

_LISTED = 6  # variants that the summary names
SIDES = {"scores": "scores of B_h", "output": "output of M_h"}


def make_form_table(content: Mapping[str, Any]) -> Table:
    """Return a row for each variant: parameters, errors over layers, the worst layer, logits."""
    limit = content["exact_below"]
    rows = []
    for form in content["forms"]:
        cells = [form["variant"], f"{form['share']:.0%}"]
        for side in SIDES:
            values = [layer[side] for layer in form["layers"]]
            worst = max(range(len(values)), key=lambda i: values[i] or 0.0)
            value = format_relative_error(values[worst], limit)
            cells.append(format_relative_error(form[side], limit))
            cells.append("" if value in ("exact", "–") else f"{value} L{worst}")
        residual = form["logits"]
        rows.append([*cells, "" if residual is None else f"{residual:.0e}"])
    columns = ["variant", "params", "scores", "worst scores", "output", "worst output", "logits"]
    return Table("Approximation errors of variants", columns, rows)


def make_form_tables(section: Section) -> list[Table]:
    """Return the table of each imported run whose forms were measured."""
    several = len(section.inspections) > 1
    tables = []
    for name, inspection in section.inspections.items():
        if inspection.forms is not None:
            table = make_form_table(inspection.forms)
            title = f"{table.title}: {name}" if several else table.title
            notes = [f"on {inspection.forms['tokens']}", *group_obstacles(inspection.forms)]
            tables.append(Table(title, table.columns, table.rows, notes))
    return tables


def summarize_forms(section: Section) -> list[str]:
    """Return sentences about imported runs: what represents them, or how to measure it."""
    sentences = ["Imported weights: they were not trained here, so that there is no loss."]
    measured = [i.forms for i in section.inspections.values() if i.forms is not None]
    for forms in measured:
        exact = [form["variant"] for form in forms["forms"] if form["logits"] is not None]
        smaller = [f for f in forms["forms"] if f["logits"] is None and f["share"] < 1]
        if exact:
            sentences.append(
                f"The attention is represented exactly by {format_list(exact, _LISTED)}."
            )
        if smaller:
            first = smaller[0]
            errors = [
                f"the {side} {'equal' if value == 'exact' else f'off by {value} of their size'}"
                for side in SIDES
                if (value := format_relative_error(first[side], forms["exact_below"]))
            ]
            sentences.append(
                f"Of the smaller variants {first['variant']} is the closest, without training:"
                f" {', '.join(errors)}."
            )
    if len(measured) < len(section.study.all_records):
        command = format_inspect_command(section)
        sentences.append(f"To measure its heads, and how well variants represent it: {command}")
    return sentences


def format_inspect_command(section: Section) -> str:
    """Return the command that measures the first imported run that has no forms yet."""
    records = [
        record
        for entry in section.study.entries
        for record in entry.with_status("imported")
        if (known := section.inspections.get(entry.name)) is None or known.forms is None
    ] or section.study.all_records
    out = section.study.out
    words = ["inspect", records[0].folder.resolve().name, "--variants"]
    return shlex.join(["qkablate", *words, *([] if out == "outputs" else [f"out={out}"])])


def group_obstacles(content: Mapping[str, Any]) -> list[str]:
    """Return a line per reason, with the variants that cannot be fitted to the circuits."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in content["obstacles"].items():
        by_reason.setdefault(reason, []).append(name)
    return [f"{', '.join(names)}: {reason}" for reason, names in by_reason.items()]


def format_relative_error(value: float | None, limit: float) -> str:
    """Format a relative error; below the limit it is rounding."""
    if value is None:
        return "–"
    return "exact" if value < limit else f"{value:.3f}" if value >= 5e-4 else f"{value:.0e}"


def print_forms(content: Mapping[str, Any], layer: int | None) -> None:
    """Print the table of the variants, or the heads of one layer."""
    if layer is None:
        table = make_form_table(content)
        print_table(table.columns, table.rows)
    else:
        for side, title in SIDES.items():
            print(f"\n{title}, layer {layer}: error of each head relative to its own")
            _print_heads(content, side, layer)
    print("\nVariants that cannot be fitted to the run's circuits")
    for line in group_obstacles(content):
        print_text(f"  {line}", "    ")
    if layer is None:
        print_text(
            f"\nlogits: largest difference of the converted model's, relative to the largest logit,"
            f" in {content['precision']}"
        )


def _print_heads(content: Mapping[str, Any], side: str, layer: int) -> None:
    limit, rows = content["exact_below"], []
    for form in content["forms"]:
        held = form["layers"][layer]
        values = [held[side], *held[f"{side}_H"]]
        rows.append([form["variant"], *(format_relative_error(value, limit) for value in values)])
    heads = [f"H{head}" for head in range(len(rows[0]) - 2)]
    print_table(["variant", "layer", *heads], rows)
