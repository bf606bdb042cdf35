"""The reference pages of the documentation, written from the code that they describe.

`python scripts/reference.py FOLDER` writes them; `make docs` calls `pages` through docs_hooks.py.
"""

import contextlib
import html
import inspect
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from diagrams import OV_FACTS, QK_FACTS, draw_variant

from qkablate.cli import VERBS, dispatch
from qkablate.config import KEYS, Config, Role, conf_dir, flatten
from qkablate.config.keys import BIG, Key
from qkablate.config.sweep import SWEEP_KEYS, SweepConfig, as_word

_KEYS = """# Config keys

Every key of a run and of a sweep, from the table in `qkablate/config`. A key is set with
`key=value`; `qkablate train --cfg job` shows the values that a command sets.

The column **id** says whether a value is part of the run's id: *yes* (the value is hashed),
*content* (the id hashes what the value leads to: the data, the circuit's file, the kernel that
`auto` chose), or – (the value changes no number).
"""

_VERBS = """# Verbs

Each verb's `--help`, as the program prints it. The [command line](../command-line.md) page has the
syntax that they share.
"""

_VARIANTS = """# Variants

Every variant of the catalogue. A diagram shows what a variant does to standard attention: a matrix
that is **removed** is struck out, matrices that are **merged** share one box, matrices that are
**tied** have an equal sign between them, and what is **new** has a bold outline. `·` is the product
of queries and keys, `Σ` the weighted sum over positions.

B_h is the matrix of the scores of head h, x_iᵀ B_h x_j, and M_h that of its output, x_jᵀ M_h. Where
an equation defines only one of the two, the other is that of standard. E_h selects the slice of x
that belongs to head h. Parameters are per layer, without biases: d is d_model, h heads, k d_head,
r `variant.rank`, g `variant.groups`, T `model.context`. **Match** says how well the initialization
equals that of standard: *exact*, *spread* (the standard deviation of the scores or outputs), or
*none*; [Matched initialization and rates](../matching.md) explains it, and lists the learning
rates.
"""

_CIRCUITS = """## Circuits

What each circuit does to the four matrices. The two sides combine freely, as in
`variant.qk=merged variant.ov=no_o`; an unsupported combination is rejected with the reason.
"""

_PRESETS = """# Presets

The files of `conf/`, chosen with `group=name`. `qkablate data list` shows which texts are prepared,
`qkablate claim list` how long each claim takes on your machine.
"""


def pages() -> dict[str, str]:
    """Return the Markdown of every generated page by its path in the documentation."""
    return {
        "reference/keys.md": write_keys(),
        "reference/verbs.md": write_verbs(),
        "reference/variants.md": write_variants(),
        "reference/presets.md": write_presets(),
    }


def write_keys() -> str:
    """Return the page with one table of keys per section of the config."""
    lines = [_KEYS, "## Keys of a run\n"]
    lines += _write_sections(Config, KEYS)
    lines += ["## Keys of a sweep\n", "None of them is part of a run's id.\n"]
    lines += _write_sections(SweepConfig, SWEEP_KEYS)
    return "\n".join(lines)


def _write_sections(config: type[Any], table: dict[str, Key]) -> Iterator[str]:
    defaults = flatten(config())
    sections: dict[str, list[str]] = {"": [name for name in table if "." not in name]}
    for name in table:
        if "." in name:
            sections.setdefault(name.partition(".")[0], []).append(name)
    for section, names in sections.items():
        if section:
            kind = type(getattr(config(), section))
            yield f"### {section}\n\n{(inspect.getdoc(kind) or '').splitlines()[0]}\n"
        elif names:
            yield "### Without a section\n"
        yield "| key | meaning | default | allowed | id |\n|---|---|---|---|---|"
        for name in names:
            info = table[name]
            used_by = f" ({_users(info)})" if info.used_by else ""
            cells = [
                f"<span id='{name}'></span>`{name}`",
                escape(info.help + used_by),
                f"`{_default(defaults[name])}`",
                _allowed(info, defaults[name]),
                describe_identity(info.role),
            ]
            yield f"| {' | '.join(cells)} |"
        yield ""


def _default(value: Any) -> str:
    return json.dumps(value) if isinstance(value, list | dict) else as_word(value)


def _users(info: Key) -> str:
    """Return the data sources or engines that have a key."""
    group = "engine" if {*info.used_by} & {"slurm", "ray"} else "data"
    return f"only {group}={', '.join(info.used_by)}"


def _allowed(info: Key, default: Any) -> str:
    """Return the choices and the bounds of a key."""
    choices = ("true", "false") if isinstance(default, bool) else info.choices
    words = [f"`{choice}`" for choice in choices]
    if info.bounds is not None:
        least, most = info.bounds
        words.append(f"≥ {least:g}" if most == BIG else f"{least:g} to {most:,g}")
    return ", ".join(words) or "–"


def describe_identity(role: Role) -> str:
    """Return whether a key of this role is part of the run's id."""
    return "yes" if role & Role.IDENTITY else "content" if role & Role.CONTENT else "–"


def write_verbs() -> str:
    """Return the page with the help of every verb."""
    lines = [_VERBS, "| verb | |\n|---|---|"]
    lines += [f"| [`{verb}`](#{verb}) | {escape(text)} |" for verb, text in VERBS.items()]
    for verb in VERBS:
        lines.append(f"\n## {verb} {{#{verb}}}\n\n```text\n{help_of(verb).rstrip()}\n```")
    return "\n".join(lines) + "\n"


def help_of(verb: str) -> str:
    """Return what `qkablate VERB --help` prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        dispatch([verb, "--help"])
    return printed.getvalue()


def write_variants() -> str:
    """Return the page with the diagram, the equation and the facts of every variant."""
    from qkablate.config import ModelConfig, VariantConfig, resolve_variant, variants
    from qkablate.models.catalogue import make_attention

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        dispatch(["variants", "--json"])
    lines = [_VARIANTS]
    for row in json.loads(printed.getvalue()):
        name = row["variant"]
        entry = VariantConfig(**variants()[name])
        layer = make_attention(ModelConfig(), resolve_variant(entry, ModelConfig()))
        svg = draw_variant(row["qk"], row["ov"], row["norm"], row["mask_self"])
        facts = {
            "equation": row["equation"],
            "parameters": row["parameters"],
            "match": "" if name == "standard" else layer.match,
            "source": row["source"],
        }
        lines.append(f"## {name}\n\n{escape(first_comment(conf_dir() / f'variant/{name}.yaml'))}\n")
        lines.append(f'<div class="circuit">{svg}</div>\n')
        lines.append("| | |\n|---|---|")
        lines += [f"| {key} | {escape(text)} |" for key, text in facts.items() if text]
        words = [f"variant.{key}={row[key]}" for key in ("qk", "ov", "norm")]
        words += ["variant.mask_self=true"] * row["mask_self"]
        words = [word for word in words if not word.endswith(("=separate", "=none"))]
        if words:
            lines.append(f"| circuits | `{' '.join(words)}` |")
        lines.append("")
    lines += [_CIRCUITS, *_write_circuits("qk", "W_q", "W_k"), *_write_circuits("ov", "W_v", "W_o")]
    return "\n".join(lines) + "\n"


def _write_circuits(side: str, first: str, second: str) -> Iterator[str]:
    yield f"| `variant.{side}` | {first} | {second} |\n|---|---|---|"
    for name, facts in (QK_FACTS if side == "qk" else OV_FACTS).items():
        yield f"| `{name}` | {' | '.join(map(escape, facts.describe()))} |"
    yield ""


def write_presets() -> str:
    """Return the page with the first line of every file of conf/."""
    lines = [_PRESETS]
    for group in sorted(path for path in conf_dir().iterdir() if path.is_dir()):
        files = sorted(group.glob("*.yaml"))
        lines.append(f"## {group.name}\n\n| `{group.name}=` | |\n|---|---|")
        lines += [f"| `{file.stem}` | {escape(describe_preset(file))} |" for file in files]
        lines.append("")
    return "\n".join(lines)


def describe_preset(file: Path) -> str:
    """Return the first comment of a file of conf/, or what a claim says."""
    import yaml

    if file.parent.name == "claim":
        return str(yaml.safe_load(file.read_text(encoding="utf-8"))["says"])
    return first_comment(file)


def first_comment(file: Path) -> str:
    """Return the comment in the first line of a file, if it begins with one."""
    line = file.read_text(encoding="utf-8").splitlines()[0]
    return line.removeprefix("# ") if line.startswith("#") else ""


def escape(text: str) -> str:
    """Return plain text as Markdown that shows it unchanged, inside a table, too."""
    text = html.escape(text, quote=False)
    return "".join(f"\\{char}" if char in "\\`*_{}[]|#" else char for char in text)


def main(folder: str) -> None:
    """Write the pages into a folder."""
    for name, text in pages().items():
        path = Path(folder) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
