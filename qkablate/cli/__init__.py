"""The command: one thin file per verb, imported when the verb is called."""

import os
import sys
import traceback
from importlib import import_module

from qkablate import __version__
from qkablate.errors import UserError, nearest, refuse_secrets, tell

VERBS = {
    "train": "train one variant, from config to result",
    "sweep": "a whole grid of runs, frozen, resumable",
    "status": "where a sweep stands",
    "results": "what a sweep says, with its uncertainty",
    "report": "the same as a page to read and to send, or as pictures",
    "compare": "two runs side by side",
    "claim": "hypotheses written down before their runs, and their verdicts",
    "data": "what there is to train on: list, prepare, info, show",
    "sample": "text from a trained run",
    "inspect": "what its circuits and its attention are like, head by head",
    "project": "a trained run put into another form, and healed: the form or the training?",
    "dashboard": "the saved view of a sweep in Weights & Biases",
    "sync": "what was recorded offline, to Weights & Biases",
    "variants": "the catalogue: what can be compared",
    "cost": "parameters, FLOPs and memory of variants at a size",
    "verify": "that a variant is what it says, by exact checks",
}

HELP = """qkablate: does a transformer need this attention weight matrix? Train it, and see.

Usage: qkablate VERB [key=value …] [--flag …]

Verbs
{verbs}

Examples
  qkablate train variant=merged_w                      one run on the embedded default
  qkablate train -m variant=standard,merged_w seed=0,1 four runs, paired by seed
  qkablate train --help                                every key and its options
  qkablate sweep sweep=quick --dry-run                 a whole grid: what it is, what it costs
  qkablate sweep sweep=quick                           run it; the same command goes on with it
  qkablate results quick                               gaps, intervals, ranks, audit
  qkablate report quick                                the same as a page to send
  qkablate claim run one_head                          a hypothesis, to its verdict
  qkablate sample merged_w prompt='def main('          text from a run
  qkablate inspect merged_w                            what its heads have become
  qkablate project standard variant=no_q               is it the form, or the training?
  qkablate sync                                        what was recorded offline, to W&B
  qkablate variants                                    what can be compared
  qkablate data show data=recall                       what a model is trained on
  qkablate cost --at gpt-j                             what it costs, at a size of one's choice

Shell completion
  bash, zsh  eval "$(qkablate -sc install=bash)"
  fish       qkablate -sc install=fish | source
"""


def main(argv: list[str] | None = None) -> None:
    """Run the command and exit with its code."""
    for name in ("stdout", "stderr"):  # closed by the shell, as in `>&-`
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    sys.excepthook = lambda *what: tell("".join(traceback.format_exception(*what)).rstrip())
    code: object
    try:
        code = dispatch(sys.argv[1:] if argv is None else argv)
    except UserError as error:
        tell(f"qkablate: {error}")
        code = 2
    except KeyboardInterrupt:
        print("qkablate: interrupted; a run goes on from its last checkpoint", file=sys.stderr)
        code = 130
    except BrokenPipeError:  # the reader of our output went away, as `| head` does
        code = 0
    except SystemExit as done:  # Hydra's way to end a --help
        code = done.code
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def dispatch(argv: list[str]) -> int:
    """The exit code of the verb that argv names."""
    refuse_secrets({f"word {number}": word for number, word in enumerate(argv, 1)})
    verb = argv[0] if argv else "--help"
    if verb in ("-h", "--help", "help"):
        print(HELP.format(verbs="\n".join(f"  {n:<10}{text}" for n, text in VERBS.items())), end="")
        return 0
    if verb == "--version":
        print(f"qkablate {__version__}")
        return 0
    if verb in ("-sc", "--shell-completion"):
        return int(import_module("qkablate.cli.completion").main(argv))
    if verb not in VERBS:
        known = ", ".join((*VERBS, "--help", "--version"))
        raise UserError(f"'{verb}' is not a verb; there is {known}{nearest(verb, VERBS)}")
    return int(import_module(f"qkablate.cli.{verb}").main(argv[1:]))
