"""`qkablate train`: train one run, or several with -m; a Hydra application."""

import itertools
import math
import re
from collections.abc import Set
from contextlib import suppress
from pathlib import Path
from typing import Any

from qkablate.cli.arguments import Parser, out_words
from qkablate.cli.hydra.app import run_hydra
from qkablate.compose.configs import build_jobs, compose_jobs
from qkablate.compose.words import refuse_repeated
from qkablate.config import KEYS, Config, Role, flatten, from_hydra, keys_with, variants
from qkablate.config.data import loss_unit
from qkablate.errors import UserError, print_stderr
from qkablate.report.text.table import format_known
from qkablate.runs.lease import AlreadyRunning, LeaseLost
from qkablate.runs.listing import shorten_names
from qkablate.runs.prefix import LENGTH_KEYS
from qkablate.runs.run import EXIT_CODES
from qkablate.runs.text_references import THIS_RUN, find_text_references
from qkablate.table import format_part, print_next_commands, print_table
from qkablate.tracking.wandb.run import OFFLINE
from qkablate.training.distributed.ranks import Ranks
from qkablate.training.signals import Stopped

# Flags that make Hydra read another configuration.
_OTHER_CONFIGS = {"--config-dir", "-cd", "--config-path", "-cp", "--config-name", "-cn"}

_OWN_FLAGS = ("--rerun", "--extend")  # all others are Hydra's

_MAX_NAMES = 6  # runs that the command printed after a multirun names

_SEEDS = "seed=range(6)"  # of the sweep that it names

PARSER = Parser("")
PARSER.switch("--rerun", "train again, even if the run is done")
PARSER.switch("--extend", "go on from the stable phase of a shorter wsd run")


def main(argv: list[str]) -> int:
    """Train with one process, or with the several that torchrun has started."""
    ranks = Ranks.from_environment()
    ranks.silence_others()
    try:
        return _main(argv, ranks)
    except UserError as error:
        if ranks.is_first:
            raise
        ranks.reject(str(error))
        return 2


def _main(argv: list[str], ranks: Ranks) -> int:
    """Remove the verb's own flags, and pass the rest to Hydra."""
    from qkablate.cli.hydra import multirun

    are_several = bool({"-m", "--multirun"} & {*argv})
    if ranks.count > 1 and are_several:
        raise UserError(
            "-m: several processes train one run together; without torchrun, -m trains many"
        )
    if "--extend" in argv and are_several:
        raise UserError("--extend: one run goes on from another; give it without -m")
    flags, config_flags = {*_OWN_FLAGS} & {*argv}, find_config_flags(argv)
    codes: list[int] = []
    multirun.CheckEveryJob.runs, multirun.CheckEveryJob.folder = [], None

    def task(composed: Any) -> float:
        """Train one run, and return what a sweeper minimizes."""
        from hydra.core.hydra_config import HydraConfig
        from hydra.types import RunMode

        is_multirun = HydraConfig.get().mode == RunMode.MULTIRUN
        loss = math.inf
        try:
            code, loss = _train(composed, flags, is_multirun, ranks, config_flags)
            codes.append(code)
        except UserError as error:  # printed here: Hydra would add lines of its own
            if not ranks.is_first:
                raise
            print_stderr(f"qkablate: {error}")
            codes.append(2)
        except OSError as error:  # before training started, as of a full disk
            print_stderr(f"qkablate: {error}")
            codes.append(1)
        ranks.send_job(codes[-1])
        if codes[-1] != 1:
            ranks.disconnect()
        return loss

    argv = [word for word in argv if word not in _OWN_FLAGS]
    refuse_repeated(argv)
    words = {word.partition("=")[0] for word in argv}
    if words & {"--cfg", "-c"} and not words & _OTHER_CONFIGS:
        _check([word for word in argv if "=" in word and not word.startswith(("-", "hydra"))])
    run_hydra("train", argv, task)
    if search := multirun.read_search():
        print("\n" + "\n".join(search))
    if multirun.CheckEveryJob.runs:
        outcomes = multirun.read_outcomes()
        with suppress(BrokenPipeError):
            _print_table(outcomes)
        codes += [EXIT_CODES.get(o["status"], 1) for o in outcomes]
    return next((code for code in (2, 1, 3) if code in codes), 0)


def find_config_flags(argv: list[str]) -> list[str]:
    """Return the flags, with their values, that make Hydra read another configuration."""
    flags = []
    for word, following in itertools.zip_longest(argv, argv[1:], fillvalue=""):
        if word.partition("=")[0] in _OTHER_CONFIGS:
            flags += [word] if "=" in word else [word, following]
    return flags


def _check(words: list[str]) -> None:
    """Raise UserError for a configuration that no run can have; Hydra would print it."""
    from qkablate.training import hardware
    from qkablate.training.resolve import build_empty_model

    build_jobs(compose_jobs(words), lambda config: build_empty_model(hardware.resolve(config), 1))


def _train(
    composed: Any, flags: Set[str], is_multirun: bool, ranks: Ranks, config_flags: list[str]
) -> tuple[int, float]:
    """Train one run, print its result, and return its exit code and its validation loss.

    The loss of a run that has none, as one that diverged or failed, is infinite.
    """
    from hydra.core.hydra_config import HydraConfig

    extend = "--extend" in flags
    config = ranks.resolve(from_hydra(composed, resolved=not extend))
    if ranks.is_first:
        _note_other_variant(config, HydraConfig.get().overrides.task)
    from qkablate.data.corpus import check_available

    check_available(config.data)
    from qkablate.api.train import train_config
    from qkablate.training.session import follow

    ranks.connect(config.device)
    try:
        if not ranks.is_first:
            return follow(ranks), math.inf
        rerun = "--rerun" in flags
        planned, outcome = train_config(config, rerun=rerun, extend=extend, ranks=ranks)
    except (AlreadyRunning, LeaseLost) as error:
        print_stderr(f"qkablate: {error}")
        return 1, math.inf
    except Stopped as stopped:
        ranks.disconnect()
        # In a multirun, too: an interrupt must not start the next job.
        raise SystemExit(stopped.exit_code) from None
    except RuntimeError as error:
        if not ranks.is_peer_failure(error):
            raise
        if not ranks.peer_failure_printed:  # before or after the training
            with suppress(RuntimeError), ranks.report_peer_failure():
                raise
        return 1, math.inf
    with suppress(BrokenPipeError):  # as in `| head`: the run is done all the same
        _print_result(outcome.result, outcome.trained, planned.run.folder)
        if not is_multirun:
            typed = [*HydraConfig.get().overrides.task]
            words = [*config_flags, *typed, *_words_of_extension(planned.config, typed) * extend]
            words += _words_of_rotation(planned.config, typed)
            print_next(
                outcome.result, words, planned.run.folder, config.optim.lr, _counterpart(config)
            )
    if is_multirun and outcome.signal:
        raise SystemExit(128 + outcome.signal)
    status = outcome.result["status"]
    return EXIT_CODES[status], outcome.result["loss"]["val"] if status == "done" else math.inf


def _note_other_variant(config: Config, typed: list[str]) -> None:
    """Say if the keys of the variant make it another one, as variant=qk_norm variant.norm=none."""
    asked = dict(word.split("=", 1) for word in typed if "=" in word).get("variant")
    name = config.variant.name
    if asked in variants() and name in variants() and name != asked:
        keys = " ".join(w for w in typed if w.startswith(("variant.", "model.heads=")))
        print_stderr(f"{asked} with {keys or 'these settings'} is {name}")


def _words_of_extension(config: Config, typed: list[str]) -> list[str]:
    """Return the settings that a run has taken over from the one that it extends."""
    values, keys = flatten(config), {word.partition("=")[0] for word in typed}
    return [f"{key}={values[key]}" for key in LENGTH_KEYS if key not in keys]


def _print_result(result: dict[str, Any], trained: bool, folder: Path) -> None:
    if not trained:
        print(f"this run ended before ({result['ended']}); --rerun trains it again")
    print(f"\n{result['label']}: {result['status']}")
    if result["status"] == "done":
        loss, bits, accuracy = (result[key] for key in ("loss", "bits_per_byte", "accuracy"))
        splits = [split for split in ("val", "test", "train") if loss[split] is not None]

        def join(values: dict[str, float], form: str = ".4f") -> str:
            known = {name: values[name] for name in splits if values.get(name) is not None}
            return "   ".join(f"{name} {value:{form}}" for name, value in known.items())

        unit = loss_unit(result["data"]["source"], result["data"].get("objective"))
        print(f"  loss      {join(loss)}   {unit}")
        if parts := _format_parts(result):
            print(f"            {parts}")
        if bits["val"] is not None:
            print(f"  bits      {join(bits)}   per byte")
        if accuracy["val"] is not None:
            chance = "" if result.get("chance") is None else f"   chance {result['chance']:.1%}"
            print(f"  accuracy  {join(accuracy, '.1%')}{chance}")
        if (exact := result["exact"])["val"] is not None:
            print(f"  exact     {join(exact, '.1%')}   of the sequences")
        for references in find_text_references([(THIS_RUN, result)]):
            print(f"  compare   {references}")
    elif result["status"] == "diverged":
        print(f"  the loss became non-finite at step {result['diverged_at']}")
    else:
        print(f"  {result['error']} (traceback in {folder / 'error.txt'})")
        if result.get("out_of_memory"):
            print(
                "  out of memory: lower train.batch_size (train.grad_accum keeps the tokens of a"
                " step), or set train.checkpoint_activations=true"
            )
    speed = result["tokens_per_second"]
    pace = f", {speed:,.0f} tokens/s in training steps" if speed else ""
    print(f"  time      {result['seconds']:.1f} s for {result['tokens']:,} tokens{pace}")
    print(f"  folder    {folder}")


def _format_parts(result: dict[str, Any]) -> str:
    """Return how much of the splits the losses were read of; '' for all of them."""
    val, test = result.get("eval_tokens"), result.get("test_tokens")
    if val is None and test is None:
        return ""
    parts = f"val and train of {format_part(val)}"
    return parts if result["loss"]["test"] is None else f"{parts}, test of {format_part(test)}"


def _counterpart(config: Config) -> str:
    """Return the variant that is compared with standard: no rotation can be inside a merged W."""
    is_inside = config.model.position == "rope" and config.variant.rope_dims is None
    return "no_q" if is_inside else "merged_w"


def _words_of_rotation(config: Config, typed: list[str]) -> list[str]:
    """Return the rotated dimensions that mla has by default, and standard beside it should have."""
    dims = config.variant.rope_dims
    if dims is None or any(word.startswith("variant.rope_dims=") for word in typed):
        return []
    return [f"variant.rope_dims={dims}"]


def print_next(
    result: dict[str, Any],
    overrides: list[str],
    folder: Path,
    lr: float,
    counterpart: str = "merged_w",
) -> None:
    """Print the commands that a user may want to type next."""
    commands: list[list[str]] = []
    if result["status"] == "done":
        own = (key for key in keys_with(Role.VARIANT) if key != "variant.rope_dims")
        ignored = ("variant=", *own, "seed=", "~", "hydra")
        words = [word for word in overrides if not word.startswith(ignored)]
        variant = re.sub(
            r"_rope\d+$", "", result["variant"]
        )  # the words have its rotated dimensions
        other = "standard" if variant != "standard" else counterpart
        shared = [word for word in words if not _is_own_rate(word)]
        commands.append(["train", f"variant={other}", f"seed={result['seed']}", *shared])
        if comparison := _propose_comparison(other, variant, overrides, words):
            commands.append(comparison)
    elif result["status"] == "diverged":
        kept = [word for word in overrides if not word.startswith("optim.lr=")]
        commands.append(["train", *kept, f"optim.lr={lr / 10:.3g}"])
    if result.get("wandb") == OFFLINE:
        commands.append(["sync", str(folder)])
    elif result.get("wandb"):
        print(f"  W&B       {result['wandb']}")
    if commands:
        print_next_commands(*commands)


def _propose_comparison(
    other: str, variant: str, overrides: list[str], words: list[str]
) -> list[str]:
    """Return the command that compares a run's variant with another one over several seeds."""
    if any(word.startswith("init_from.") for word in overrides):  # every variant needs its own
        return []
    # A sweep reads folders of the user's, but no other primary config and no new groups.
    is_other = any(word.startswith("+") or _is_other_flag(word) for word in words)
    has_own_rate = any(map(_is_own_rate, words))
    if variant in variants() and not (has_own_rate and other == "standard"):
        pair = f"variant={other},{variant}"
        several = ["train", "-m", pair, "seed=0,1,2"] if is_other else ["sweep", pair, _SEEDS]
        return [*several, *(word for word in words if not _is_own_rate(word))]
    own = [w for w in overrides if w.startswith(("variant=", "variant.")) and w not in words]
    is_file = any(word.startswith("variant.file=") for word in own)
    # The sweep adds its baseline, without the number of this circuit's rate.
    return ["sweep", *own, _SEEDS, *words] if (is_file or has_own_rate) and not is_other else []


def _is_own_rate(word: str) -> bool:
    """Return whether a word sets the rate of one circuit, by a number that fits no other."""
    key, _, value = word.partition("=")
    return key == "variant.lr" and value not in KEYS["variant.lr"].choices


def _is_other_flag(word: str) -> bool:
    return word.startswith("-") and word.partition("=")[0] != "--config-dir"


def _print_table(outcomes: list[dict[str, Any]]) -> None:
    # For text bits per byte, which are comparable across tokenizers; for tasks the accuracy.
    optional = {"bits_per_byte": "bits/byte", "accuracy": "accuracy", "exact": "exact"}
    shown = {
        key: title
        for key, title in optional.items()
        if any(o.get(key, {}).get("test") is not None for o in outcomes)
    }
    rows = [
        [
            *(o["folder"].name, o["varied"], o["status"]),
            *(format_known(o["loss"].get(split)) for split in ("val", "test")),
            *(format_known(o.get(key, {}).get("test")) for key in shown),
            format_known(o["seconds"], ".1f"),
        ]
        for o in outcomes
    ]
    print()
    print_table(["run", "", "status", "val", "test", *shown.values(), "seconds"], rows, left=3)
    out = out_words(str(outcomes[0]["folder"].parent.parent))
    names = shorten_names(dict.fromkeys(outcome["folder"].name for outcome in outcomes))
    is_short = 1 < len(names) <= _MAX_NAMES
    commands = [["results", *names.values(), *out] if is_short else ["ls", *out]]
    if any(outcome.get("wandb") == OFFLINE for outcome in outcomes):
        commands.append(["sync", *out])
    print_next_commands(*commands)
