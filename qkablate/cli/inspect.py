"""`qkablate inspect`: what the circuits and the attention of a trained run are like."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qkablate.cli.drawn import check_picture, draw
from qkablate.cli.hydra.configs import next_commands, run_and_keys, take_flags, take_out
from qkablate.errors import UserError, printable
from qkablate.report.text.heads import print_looks, print_measures, print_spectra
from qkablate.table import counted, print_json

HELP = """qkablate inspect: what the circuits and the attention of a trained run are like.

Usage: qkablate inspect RUN [key=value …] [--layer N] [--head N] [--text TEXT] [--json]
                            [-o FILE]

RUN is the folder of a run, or how its name or its id in outputs/runs begins. Its newest checkpoint
is looked at; it may still be training. Two tables are of the matrices, B_h (what head h scores) and
M_h (what it writes), one is of the attention on the beginning of the validation split, if that is
prepared on this machine. Training writes the same numbers (diagnose.every).

Flags
  --layer N --head N  only these, with their spectrum; from 0
  --text TEXT         how much each token of it looks at which: with --layer and --head the three
                      it looks at most, with --json the weights of all layers and heads
  -o FILE             with --text: a picture of that, of all heads or of one; FILE.svg or FILE.png
  --json              every number, of every layer and head

Keys
  step=N              the checkpoint of this step (default: the newest)
  out=outputs         where runs/ lies
  data.cache=FOLDER   where the run's data is prepared (default: where it is unless said)
  variant.file=PATH   the file of the run's own circuit, if it was trained with one
  variant.qk=NAME     the name of its QK circuit, if that is an installed package's
  variant.ov=NAME     the same of its OV circuit

Measures of B_h and M_h
  stable_rank     ‖B‖² / σ₁², how many directions share the strength
  effective_rank  exp of the entropy of the normalised singular values σ
  nuclear         Σσ
  frobenius       ‖B‖; of B_h as if its scores had standard's scale, so that forms compare
  symmetry        1: B = Bᵀ, -1: B = -Bᵀ
  directionality  1: single columns stand out (of B_h: what keys must be like; of M_h: what is
                  written), -1: single rows (queries; what is read)
  moved           ‖B - start‖ / ‖start‖
  off_rank        what the nearest matrix of rank d_head leaves of ‖B‖
  balance         0: the two factors are even, 1: one of them has it all

Measures of the attention
  score_std       spread of the scores that a query sees
  score_max       the largest score
  entropy         of the weights of a query, in nats
  self, first, previous  weight on a query's own position, the first, the one before
  sink            what the position that is looked at most gets beyond an equal share
  induction       on a random block that comes twice: weight on what came after the same token
  repeat_previous on the same block: weight on the token before

Examples
  qkablate inspect merged_w
  qkablate inspect merged_w --layer 0 --head 2
  qkablate inspect merged_w --layer 0 --head 2 --text 'def main(self):'
  qkablate inspect merged_w --text 'def main(self):' -o heads.svg
  qkablate inspect outputs/runs/merged_w-d128-h4-s0-0123456789ab --json > merged_w.json
"""
KEYS = ("step", "out", "data.cache", "variant.file", "variant.qk", "variant.ov")
FLAGS = ("--layer", "--head", "--text", "--json", "-o", "--help")
_PARTS = {"qk": "B_h, what a head scores", "ov": "M_h, what a head writes"}


@dataclass(frozen=True)
class Wish:
    """What the user asked for."""

    run: str
    keys: dict[str, str]
    out: str
    step: int | None
    layer: int | None
    head: int | None
    text: str | None
    json: bool
    picture: str | None


def main(argv: list[str]) -> int:
    flags, words = take_flags(
        argv, ("--help", "-h", "--json"), with_value=("--layer", "--head", "--text", "-o")
    )
    if {"--help", "-h"} & {*flags}:
        print(HELP, end="")
        return 0
    return _inspect(parse(flags, words))


def words() -> Iterator[str]:
    """What completion offers: the runs, then the keys and flags."""
    yield from (path.parent.name for path in sorted(Path("outputs/runs").glob("*/config.yaml")))
    yield from (f"{key}=" for key in KEYS)
    yield from FLAGS


def parse(flags: dict[str, str], words: list[str]) -> Wish:
    """Strict, and before anything heavy is imported."""
    rest, out = take_out(words)
    run, given = run_and_keys(rest, KEYS, "inspect RUN")
    step = given.pop("step", None)
    layer, head, text = (flags.get(f"--{name}") for name in ("layer", "head", "text"))
    as_json = "--json" in flags
    if as_json and (layer or head):
        raise UserError("--json gives every layer and head; leave out --layer and --head")
    picture = flags.get("-o")
    one = layer is not None and head is not None
    if text is not None and not (as_json or picture or one):
        raise UserError("--text: which head is to read it? Give --layer and --head, --json or -o")
    if picture is not None and text is None:
        raise UserError("-o: a picture of which text? Give --text")
    if picture is not None and one != (layer is not None or head is not None):
        raise UserError("-o: a picture of all heads, or of one: give both --layer and --head")
    check_picture(picture)
    try:
        (text or "").encode("utf-8")
    except UnicodeEncodeError:  # the shell's bytes were no UTF-8
        raise UserError("--text: it is not UTF-8 text") from None
    return Wish(
        run=run,
        keys=given,
        out=out,
        step=_whole("step", step),
        layer=_whole("--layer", layer),
        head=_whole("--head", head),
        text=text,
        json=as_json,
        picture=picture,
    )


def _whole(name: str, value: str | None) -> int | None:
    if value is None:
        return None
    if not (value.isascii() and value.isdecimal() and len(value) < 16):
        raise UserError(f"{name}: '{printable(value[:40])}' is not a whole number from 0 on")
    return int(value)


def _inspect(wish: Wish) -> int:
    from qkablate.runs.run import find_run

    folder = find_run(wish.run, wish.out)

    from qkablate.diagnostics import Panel
    from qkablate.training.recorders.diagnostics import starts_of, tokens_for
    from qkablate.training.warm_start.restore import restore

    keys = wish.keys
    restored = restore(
        folder,
        variant_file=keys.get("variant.file"),
        qk=keys.get("variant.qk"),
        ov=keys.get("variant.ov"),
        step=wish.step,
    )
    model, config = restored.model, restored.config
    _check_within("--layer", wish.layer, config.model.layers)
    _check_within("--head", wish.head, config.model.heads)
    text = _read(restored, wish.text) if wish.text is not None else None
    tokens_BT, source = tokens_for(restored, keys.get("data.cache", "auto"))
    row = Panel(model, tokens_BT, starts=starts_of(model, config, folder / "start")).row()
    attention = model.attentions()[0]
    name = folder.resolve().name
    drawn = ""
    if text is not None and wish.picture is not None:
        only = None if wish.layer is None or wish.head is None else (wish.layer, wish.head)
        drawn = draw(Path(wish.picture), text, name, restored, only)
    rows, length = tokens_BT.shape
    if wish.json:
        print_json(
            {
                "run": name,
                "step": restored.step,
                "variant": config.variant.name,
                "equation": attention.equation,
                "no_circuit": attention.no_circuit or None,
                "tokens": {"of": source, "sequences": rows, "length": length},
                **row,
                **({} if text is None else {"text": text}),
            }
        )
        return 0
    print(f"{printable(name)}, step {restored.step}: {attention.equation}")
    shown = [
        (layer, head)
        for layer in range(config.model.layers)
        for head in range(config.model.heads)
        if wish.layer in (None, layer) and wish.head in (None, head)
    ]
    close = wish.layer is not None or wish.head is not None
    for part, title in _PARTS.items():
        if row[part]["frobenius"][0] is None:
            why = getattr(attention, part).no_circuit or "its numbers are none"
            print(f"\n{title}: no matrix, for {why}")
            continue
        aside = f" ({attention.no_circuit})" if part == "qk" and attention.no_circuit else ""
        print(f"\n{title}{aside}")
        print_measures(row[part], shown)
        if close:
            print_spectra(row[part]["singular"], shown)
    looked_at = f"{counted(rows, 'sequence')} of {counted(length, 'token')} of {printable(source)}"
    print(f"\nAttention, on {looked_at}")
    print_measures(row["attention"], shown)
    if text is not None and close:
        print_looks(text, *shown[0])
    if drawn:
        print(f"\n{printable(drawn)}")
    next_commands(_following(wish, config, row))
    return 0


def _check_within(flag: str, value: int | None, count: int) -> None:
    if value is not None and value >= count:
        allowed = f"0 to {count - 1}" if count > 1 else "0 alone"
        raise UserError(f"{flag}: there is no {value} (allowed: {allowed})")


def _read(restored: Any, text: str) -> dict[str, Any]:
    """The tokens of a text, and the weights A_LHTS."""
    import torch

    from qkablate.diagnostics import attention_weights
    from qkablate.diagnostics.panel import LENGTH, rounded

    tokenizer = restored.tokenizer()
    if unknown := tokenizer.unknown(text):
        raise UserError(f"--text: this run's tokenizer knows no {', '.join(map(repr, unknown))}")
    ids = tokenizer.encode(text.encode()).tolist()
    most = min(LENGTH, restored.config.model.context)
    if len(ids) > most:
        raise UserError(f"--text: {len(ids)} tokens are more than the {most} that can be shown")
    a_LHTS = attention_weights(restored.model, torch.tensor(ids))
    tokens = [tokenizer.decode([token]).decode("utf-8", "replace") for token in ids]
    return {"tokens": tokens, "ids": ids, "attention": rounded(a_LHTS.tolist())}


def _following(wish: Wish, config: Any, row: dict[str, Any]) -> list[str]:
    """A closer look at the head whose scores spread most; after that, what the model writes."""
    from qkablate.config import TEXT_SOURCES

    own = [f"{key}={value}" for key, value in wish.keys.items()]
    own += [] if wish.out == "outputs" else [f"out={wish.out}"]
    if wish.layer is None and wish.head is None:
        own += [] if wish.step is None else [f"step={wish.step}"]
        heads = {
            (layer, head): value
            for layer, values in enumerate(row["attention"]["score_std"])
            for head, value in enumerate(values)
            if value is not None
        }
        layer, head = max(heads, key=lambda place: heads[place], default=(0, 0))
        return ["inspect", wish.run, *own, "--layer", str(layer), "--head", str(head)]
    if config.data.source not in TEXT_SOURCES:  # a task's tokens are no text
        return ["data", "info", f"data={config.data.source}"]
    return ["sample", wish.run, *(word for word in own if not word.startswith("data.cache="))]
