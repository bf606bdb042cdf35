"""`qkablate sample`: text from a trained run."""

import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from unicodedata import bidirectional, category

from qkablate.cli.hydra.configs import run_and_keys, take_flags
from qkablate.errors import UserError, tell

HELP = """qkablate sample: text from a trained run.

Usage: qkablate sample RUN [key=value …]

RUN is the folder of a run, or how its name or its id in outputs/runs begins. Its newest checkpoint
writes; it may still be training. Where prompt and text outgrow the model's context, it goes on from
the last half of it.

Keys
  prompt=TEXT        what the text begins with, as it stands: \\n is no newline (default: a newline)
  tokens=200         how many to write
  temperature=0.8    below 1 is less daring; 0 always takes the likeliest token
  top_k=K            draw from the K likeliest alone (default: from all)
  seed=0             same seed, same text
  out=outputs        where runs/ lies
  variant.file=PATH  the file of the run's own circuit, if it was trained with one
  variant.qk=NAME    the name of its QK circuit, if that is an installed package's
  variant.ov=NAME    the same of its OV circuit

Prompt and text go to stdout, what wrote them to stderr.

Examples
  qkablate sample merged_w prompt='def main('
  qkablate sample outputs/runs/merged_w-d128-h4-s0-0123456789ab temperature=0 tokens=50
  qkablate sample 0123 seed=1 top_k=20 prompt=$'import os\\n' > text.txt
"""

# Number keys: least, most.
WHOLE = {"tokens": (1, 10**9), "top_k": (1, 10**9), "seed": (0, 2**53)}
KEYS = (
    *("prompt", "tokens", "temperature", "top_k", "seed", "out"),
    *("variant.file", "variant.qk", "variant.ov"),
)


@dataclass(frozen=True)
class Wish:
    """What the user asked for."""

    run: str
    prompt: str | None = None
    tokens: int = 200
    temperature: float = 0.8
    top_k: int | None = None
    seed: int = 0
    out: str = "outputs"
    variant_file: str | None = None
    variant_qk: str | None = None
    variant_ov: str | None = None


def main(argv: list[str]) -> int:
    flags, words = take_flags(argv, ("--help", "-h"))
    if flags:
        print(HELP, end="")
        return 0
    try:
        return _sample(parse(words))
    except KeyboardInterrupt:
        print(f"{_line_break()}qkablate: interrupted", file=sys.stderr)
        return 130


def words() -> Iterator[str]:
    """What completion offers: the runs, then the keys."""
    yield from (path.parent.name for path in sorted(Path("outputs/runs").glob("*/config.yaml")))
    yield from (f"{key}=" for key in KEYS)


def parse(words: list[str]) -> Wish:
    """Strict, and before anything heavy is imported."""
    run, given = run_and_keys(words, KEYS, "sample RUN prompt='a text'")
    try:
        given.get("prompt", "").encode("utf-8")
    except UnicodeEncodeError:  # the shell's bytes were no UTF-8
        raise UserError("prompt: it is not UTF-8 text") from None
    parsed: dict[str, object] = {key.replace(".", "_"): value for key, value in given.items()}
    parsed |= {key: _whole(key, given[key]) for key in WHOLE if key in given}
    if "temperature" in given:
        parsed["temperature"] = _temperature(given["temperature"])
    return Wish(run, **parsed)  # type: ignore[arg-type]


def _whole(key: str, value: str) -> int:
    least, most = WHOLE[key]
    digits = value.isascii() and value.isdecimal() and len(value) < 20
    if not digits or not least <= int(value) <= most:
        raise UserError(f"{key}: '{value}' is not a whole number from {least} to {most}")
    return int(value)


def _temperature(value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 <= number <= 100:
        raise UserError(f"temperature: '{value}' is not a number from 0 to 100")
    return number


def _sample(wish: Wish) -> int:
    from qkablate.runs.run import find_run

    folder = find_run(wish.run, wish.out)

    from qkablate.models.generate import characters, generate
    from qkablate.training.warm_start.restore import restore

    restored = restore(
        folder, variant_file=wish.variant_file, qk=wish.variant_qk, ov=wish.variant_ov
    )
    tokenizer = restored.tokenizer()
    prompt = wish.prompt
    if prompt is None:  # a newline, or the first character there is
        prompt = "\n" if not tokenizer.unknown("\n") else tokenizer.decode([0]).decode()
    if unknown := tokenizer.unknown(prompt):
        some = ", ".join(map(repr, unknown[:10])) + (", …" if len(unknown) > 10 else "")
        raise UserError(f"prompt: this run's tokenizer knows no {some}; write prompt=TEXT without")
    _write(prompt)
    began = time.perf_counter()
    ids = generate(
        restored.model,
        tokenizer.encode(prompt.encode()).tolist(),
        count=wish.tokens,
        temperature=wish.temperature,
        top_k=wish.top_k,
        seed=wish.seed,
    )
    for piece in characters(tokenizer, ids):
        _write(piece)
    pace = wish.tokens / (time.perf_counter() - began)
    tell(
        f"{_line_break()}{folder.resolve().name}, step {restored.step}: {wish.tokens} tokens,"
        f" {pace:,.0f} tokens/s"
    )
    return 0


def _write(text: str) -> None:
    """In UTF-8 whatever the locale, at once."""
    if sys.stdout.isatty():  # a byte of a model must not steer the terminal
        text = "".join("�" if _steers(c) else c for c in text)
    sys.stdout.buffer.write(text.encode())
    sys.stdout.buffer.flush()


def _steers(c: str) -> bool:
    """Control characters, and those that turn the direction of what follows."""
    turns = bidirectional(c) in ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
    return turns or (category(c) == "Cc" and c not in "\n\t")


def _line_break() -> str:
    """Between text and report where both go to one place, as on a terminal."""
    with suppress(OSError, ValueError):
        return "\n" * os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno())
    return ""
