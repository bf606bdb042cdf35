"""`qkablate sample`: generate text with a trained run, translate, or answer."""

import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from unicodedata import bidirectional, category

from qkablate.cli.arguments import (
    CIRCUIT_KEYS,
    Parser,
    check_utf8,
    convert_value,
    number,
    one_of,
    restore_run,
    run_and_keys,
    whole_number,
)
from qkablate.config.data import HELD_OUT_SPLITS
from qkablate.errors import UserError, print_stderr

if TYPE_CHECKING:
    from qkablate.training.warm_start.restore import RestoredRun

HELP = """qkablate sample: generate text with a trained run, translate, or answer.

Usage: qkablate sample RUN [key=value …]
       qkablate sample RUN source=TEXT [--beam N]
       qkablate sample RUN text=TEXT
       qkablate sample RUN --split SPLIT [--show N] [--beam N]

RUN is a run's folder, or a unique beginning of its name or id. Its newest
checkpoint is used; the run may still be training. When the text exceeds the
model's context, generation continues from the last half of the context. A run
with model.form=encoder_decoder translates a source; that of a task is written
as `qkablate data show` prints it. A run with model.form=encoder fills in masks,
tags the names of a statement, or answers a task.

Keys
  source=TEXT        what to translate
  text=TEXT          what an encoder answers: a text with [MASK] for each token
                     to fill in, a Python statement, or a source of a task
  prompt=TEXT        the beginning of the text, verbatim: \\n is not a newline
                     (default: a newline)
  tokens=200         how many to generate
  temperature=0.8    below 1 for less randomness; 0 always takes the most likely
                     token
  top_k=K            draw from the K most likely tokens only (default: from all)
  seed=0             the same seed gives the same text
  out=outputs        the folder that holds runs/
  data.cache=FOLDER  where the run's data is prepared, for --split (default: as
                     in train)
  variant.file=PATH  the file of the run's own circuit, if it was trained with
                     one
  variant.qk=NAME    the name of its QK circuit, if it comes from an installed
                     package
  variant.ov=NAME    the same for its OV circuit

Flags
{flags}

Text goes to stdout, the run and the speed to stderr.

Examples
  qkablate sample merged_w prompt='def main('
  qkablate sample merged_w-d128-h4-s0-0123456789ab temperature=0 tokens=50
  qkablate sample 0123 seed=1 top_k=20 prompt=$'import os\\n' > text.txt
  qkablate train model=nano_translator data=reverse
  qkablate sample standard-d64 source='s3 s1 s4 s1 s5 s9 s2 s6' --beam 5
  qkablate sample standard-d64 --split test > translations.txt
  qkablate sample standard-d64 --split test --show 5
  qkablate train model=nano_encoder model.context=64 data=stdlib \\
    data.objective=mlm out=masked
  qkablate sample standard out=masked text='def [MASK]ain(self):'

Exit codes: 0 the text is printed · 2 a mistake in the command
"""


# The default of every setting, and the function that converts it.
_SETTINGS: dict[str, tuple[Any, Callable[[str], Any]]] = {
    "source": (None, str),
    "text": (None, str),
    "prompt": (None, str),
    "tokens": (200, whole_number(1, 10**9)),
    "temperature": (0.8, number(lambda value: 0 <= value <= 100, "a number from 0 to 100")),
    "top_k": (None, whole_number(1, 10**9)),
    "seed": (0, whole_number(0, 2**53)),
}
_DIRECTIONS = {*["LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"]}
KEYS = (*_SETTINGS, "out", "data.cache", *CIRCUIT_KEYS)


PARSER = Parser(HELP, ("run",), [f"{key}=" for key in KEYS])
_BEAM_HELP = "translate by beam search with N hypotheses (default 1: greedy)"
_SPLIT_HELP = "translate or answer all of val or test; the scores go to stderr"
_SHOW_HELP = (
    "with --split: print N examples with the right answers (default: all translations, one per"
    " line; for an encoder, 5 examples)"
)
PARSER.option("--split", "SPLIT", _SPLIT_HELP, one_of(HELD_OUT_SPLITS))
PARSER.option("--show", "N", _SHOW_HELP, whole_number(1, 1000))
PARSER.option("--beam", "N", _BEAM_HELP, whole_number(1, 1000))


def main(argv: list[str]) -> int:
    """Generate text with a trained run, translate, or answer."""
    parsed = PARSER.parse(argv)
    args = parse_args(parsed.words, parsed.split, parsed.beam)
    args.show = parsed.show
    if args.show and not args.split:
        raise UserError("--show: only --split has examples; give --split test")
    try:
        restored = restore_run(args.run, args.values)
        if args.source is None and args.text is None and args.split is None:
            return _sample(args, restored)
        return _answer(args, restored)
    except KeyboardInterrupt:
        print(f"{_line_break()}qkablate: interrupted", file=sys.stderr)
        return 130


def parse_args(words: list[str], split: str | None = None, beam: int | None = None) -> Namespace:
    """Parse the words, before anything heavy is imported."""
    for key, verb in (("source", "translate"), ("text", "answer")):
        if any(word.startswith(f"{key}=") and not word[len(key) + 1 :].strip() for word in words):
            raise UserError(f"{key}: is empty; give the text to {verb}")
    run, values = run_and_keys(words, KEYS, "sample RUN prompt='a text'")
    for key in ("prompt", "source", "text"):
        check_utf8(key, values.get(key, ""))
    what = next((key for key in ("source", "text") if key in values), "--split" if split else "")
    for key in _SETTINGS:
        if what and key in values and key not in ("source", "text"):
            raise UserError(f"{key}: only generated text has one; leave out {key} or {what}")
    if "source" in values and "text" in values:
        raise UserError("text: a source is given; leave out text or source")
    if beam and what not in ("source", "--split"):
        raise UserError("--beam: only a translation has one; give source=TEXT")
    if split and what != "--split":
        raise UserError(f"--split: a {what} is given; leave out --split or {what}")
    if "data.cache" in values and not split:
        raise UserError("data.cache: only --split reads data")
    settings = {
        key: convert_value(key, values[key], convert) if key in values else default
        for key, (default, convert) in _SETTINGS.items()
    }
    return Namespace(run=run, values=values, split=split, beam=beam, **settings)


def _sample(args: Namespace, restored: "RestoredRun") -> int:
    from qkablate.models.generate import decode_text, generate

    form = restored.config.model.form
    if form == "encoder_decoder":
        raise UserError(
            f"source: a run with model.form={form} translates; give source=TEXT or --split test"
        )
    if form == "encoder":
        raise UserError(
            f"a run with model.form={form} generates no text; give text=TEXT or --split test"
        )
    tokenizer = restored.tokenizer()
    prompt = args.prompt
    if prompt is None:  # a newline, or the first token
        prompt = "\n" if not tokenizer.unknown("\n") else tokenizer.decode([0]).decode()
    if unknown := tokenizer.unknown(prompt):
        characters = ", ".join(map(repr, unknown[:10])) + (", …" if len(unknown) > 10 else "")
        raise UserError(f"prompt: the tokenizer of this run does not know {characters}")
    write_text(prompt)
    began = time.perf_counter()
    ids = generate(
        restored.model,
        tokenizer.encode(prompt.encode()).tolist(),
        count=args.tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        seed=args.seed,
    )
    for piece in decode_text(tokenizer, ids):
        write_text(piece)
    speed = args.tokens / (time.perf_counter() - began)
    print_stderr(
        f"{_line_break()}{_describe(restored)}: {args.tokens} tokens, {speed:,.0f} tokens/s"
    )
    return 0


def _answer(args: Namespace, restored: "RestoredRun") -> int:
    """Translate, or answer with an encoder."""
    from qkablate.cli.answers import answer_split, answer_text
    from qkablate.cli.translation import translate_source, translate_split

    if args.text is not None:
        answer = answer_text
    elif args.source is not None:
        answer = translate_source
    else:
        is_encoder = restored.config.model.form == "encoder"
        answer = answer_split if is_encoder else translate_split
    text, report = answer(args, restored)
    write_text(text)
    print_stderr(f"{_describe(restored)}: {report}")
    return 0


def _describe(restored: "RestoredRun") -> str:
    return f"{restored.folder.resolve().name}, step {restored.step}"


def write_text(text: str) -> None:
    """Write text at once, in UTF-8 whatever the locale."""
    if sys.stdout.isatty():  # generated control characters must not reach the terminal
        text = "".join("�" if _is_control(c) else c for c in text)
    sys.stdout.buffer.write(text.encode())
    sys.stdout.buffer.flush()


def _is_control(c: str) -> bool:
    """Return whether a character controls the terminal or the direction of text."""
    return bidirectional(c) in _DIRECTIONS or (category(c) == "Cc" and c not in "\n\t")


def _line_break() -> str:
    """Return a newline if stdout and stderr are the same file, as on a terminal."""
    with suppress(OSError, ValueError):
        return "\n" * os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno())
    return ""
