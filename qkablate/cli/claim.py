"""`qkablate claim`: hypotheses, registered before their runs, and their verdicts."""

import math
import os
import shlex
import sys
import textwrap
from argparse import Namespace
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from qkablate.cli.arguments import (
    Parser,
    choose_action,
    one_of,
    take_out,
    unpacked,
    whole_number,
)
from qkablate.compose.configs import make_config, open_hydra
from qkablate.compose.grid import read_request
from qkablate.config import config_names
from qkablate.errors import ImpossibleConfig, UserError, print_stderr
from qkablate.screen import find_screen
from qkablate.table import format_count, print_json, print_next_commands, print_text

if TYPE_CHECKING:
    from qkablate.analysis.claims.claim import Claim
    from qkablate.analysis.claims.judgement import Judgement

HELP = """qkablate claim: register a hypothesis before its runs, and judge it.

Usage: qkablate claim list [out=FOLDER] [--json]
       qkablate claim run NAME [scale=small|gpu|book] [key=value …] [--flag …]
       qkablate claim show NAME [scale=small|gpu|book] [key=value …] [--json]

NAME is a claim of `claim list`, or the path of your own YAML file. Keys are
those of `qkablate train`; a claim on another data set, for example, is another
claim with its own seeds.

Verdicts
  SUPPORTED     every part holds with its margin, by a one-sided test at α
  REFUTED       a part is shown to be false (at α, by Holm over the parts)
  EQUIVALENT    every part that says better or worse is shown to lie within ±
                its margin (by Holm over the parts), and the others are
                supported
  INSENSITIVE   no difference could have been detected: the baseline beats
                `uniform` by less than three margins (95 % bound)
  MIXED         EQUIVALENT holds for some of the parts only
  UNDERPOWERED  none of these; the number of seeds that would decide is shown
  INCOMPLETE    some runs have not ended

A part is one comparison of the claim. α is 0.05; interim analyses that a claim
declares (seeds: [6, 12, 20]) share it. A verdict holds `unless one run in k is
an outlier` if failures of training that are too rare for these seeds to exclude
would overturn it. It is `exploratory` if seeds were added beyond the declared
ones, or if the claim was edited after runs of it. Warnings of the audit limit
it: at these rates, on these documents, where content is not shown to matter,
before the model beats an n-gram, if both arms level off with one exponent
(docs/claims.md). Marks of the audit: · worth knowing, ! may have caused the
gap, ✗ runs that cannot be compared. The seeds are derived from the hash of the
claim, so that no earlier run counts.

scale=small (default) takes minutes to hours on two cores (`claim list` tells);
scale=gpu trains models of 25 M parameters, scale=book GPT-2's of 124 M.

Examples
  qkablate claim list
  qkablate claim run directed --dry-run    its runs, and how long they take here
  qkablate claim run directed              train them; the same command resumes
  qkablate claim show directed             verdict, intervals, seeds needed
  qkablate claim run directed --from docs/study/results   train what is missing
  qkablate claim run directed scale=gpu
  qkablate claim run my_claim.yaml data=text data.path=book.txt

Flags
{flags}

Exit codes: 0 there is a verdict · 1 some runs are not done · 2 a mistake in the
command · 128 + signal interrupted, as 130 by Ctrl-C (checkpoints written)
"""
PUBLISHED = "docs/study/results"  # the archives of a clone
# The flags that each action takes.
ACTIONS = {
    "list": ("json",),
    "run": ("dry_run", "from", "more", "retry"),
    "show": ("json",),
}


_SCALES = [f"scale={name}" for name in config_names("scale")]
PARSER = Parser(HELP, words=(*ACTIONS, *config_names("claim"), *_SCALES, "out="))
PARSER.switch("--dry-run", "show the design; train and register nothing")
PARSER.option(
    "--more", "N", "add N seeds to the declared ones: the verdict is exploratory", whole_number(1)
)
PARSER.option(
    "--from",
    "FOLDER",
    "reuse the published runs in this folder; missing ones are trained with the same matmul,"
    " precision and train.vmap, also on another type of CPU",
)
PARSER.option("--retry", "failed", "train failed runs again, too", one_of(["failed"]))
PARSER.switch("--json", "with list and show: print JSON")


def main(argv: list[str]) -> int:
    """List claims, run one, or show its verdict."""
    args = PARSER.parse(argv)
    if not args.words:
        PARSER.print_help()
        return 0
    action, words = choose_action(args.words, ACTIONS)
    for name in ("dry_run", "from", "json", "more", "retry"):
        if getattr(args, name) and name not in ACTIONS[action]:
            raise UserError(f"--{name.replace('_', '-')} has no meaning with claim {action}")
    if action == "list":
        return _list(words, as_json=args.json)
    if not words:
        raise UserError(
            f"give a claim: qkablate claim {action} NAME; `qkablate claim list` has them"
        )
    request = _ClaimRequest(words, reads_only=action == "show")
    return _show(request, args.json) if action == "show" else _run(request, args)


class _ClaimRequest:
    """A testable claim, with the words that name it."""

    def __init__(self, words: list[str], *, reads_only: bool) -> None:
        from qkablate.analysis.claims.claim import NON_CLAIM_KEYS
        from qkablate.analysis.claims.parse import claim_names, load_claim
        from qkablate.analysis.claims.registry import find_registrations, registered_names
        from qkablate.config import KEYS, check_digits, conf_dir, has_role, no_such_key
        from qkablate.config.sweep import SWEEP_KEYS, unquoted

        name, *rest = words
        pairs: dict[str, str] = {}
        for word in rest:
            key, equals, value = word.partition("=")
            if not equals or not key:
                raise UserError(f"'{word}' is not key=value, as in scale=gpu or data=wikitext2")
            if key == "scale" and pairs.get(key, value) != value:
                raise UserError(f"scale: given twice, '{pairs[key]}' and '{value}'")
            pairs[key] = value
        typed_scale = pairs.pop("scale", None)
        if typed_scale == "":
            raise UserError("scale: a value is missing")
        scale = typed_scale or "small"
        if fixed := pairs.keys() & {"seeds", "seed", "tuning_seeds", "margin", "parts"}:
            raise UserError(
                f"{min(fixed)}: is fixed by the claim; --more N adds seeds (exploratory), and"
                " a file of your own is another claim"
            )
        run_keys = {k: v for k, v in pairs.items() if has_role(k, NON_CLAIM_KEYS)}
        for key, value in run_keys.items():
            check_digits(key, value)
        self.run_words = [f"{k}={v}" for k, v in run_keys.items()]
        claim_keys = {k: v for k, v in pairs.items() if k not in run_keys}
        for key in claim_keys:
            is_reserved = key.partition(".")[0] in ("sweep", "control", "seed", "seeds")
            if key not in KEYS and not is_reserved and not (conf_dir() / key).is_dir():
                raise UserError(no_such_key(key, [*KEYS, *SWEEP_KEYS]))
        out = unquoted(pairs.get("out", "outputs"))
        self.out = unpacked(out) if reads_only else out
        is_archive = self.out != out  # which is no place for runs
        self.words = [w for w in words if not (is_archive and w.startswith("out="))]
        if name in registered_names(self.out) and name not in claim_names():
            registered = [entry.claim for entry in find_registrations(self.out, name)]
            if typed_scale or claim_keys:
                wanted = (scale, claim_keys)
                registered = [c for c in registered if (c.scale, dict(c.words)) == wanted]
            if not registered:
                raise UserError(
                    f"no '{name}' is registered in '{self.out}' with these keys; give its file,"
                    f" {name}.yaml"
                )
            self.claim = registered[-1]
        else:
            if name.endswith((".yaml", ".yml")) and not os.path.isfile(name):
                raise UserError(
                    f"there is no file '{name}'; `qkablate claim list` shows the shipped claims"
                )
            self.claim = load_claim(name, scale, claim_keys)
        if self.claim.untestable:
            raise UserError(f"{self.claim.name} is not testable yet: {self.claim.untestable}")

    def check_values(self) -> None:
        """Raise UserError for a value that `claim run` would reject before it trains."""
        from qkablate.analysis.claims.registry import claim_grid

        grid, words = claim_grid(self.claim, self.claim.seeds[0])
        with open_hydra():
            choices = read_request([*words, *self.run_words], grid).choices
            first = {key: values[0] for key, values in choices.items()}
            for key, values in choices.items():
                for value in values if key == "variant" else values[:1]:
                    with suppress(ImpossibleConfig):  # this arm is left out
                        make_config({**first, key: value})

    def command(self, action: str) -> list[str]:
        return ["claim", action, *self.words]


def _list(words: list[str], *, as_json: bool) -> int:
    from qkablate.analysis.claims.judgement import counting_judgement, judge_looks
    from qkablate.analysis.claims.parse import claim_names, load_claim
    from qkablate.analysis.claims.references import find_references
    from qkablate.analysis.claims.registry import find_registrations, registered_names
    from qkablate.analysis.publication import reuse
    from qkablate.sweeps.planning.estimate import measure_pace

    rest, out = take_out(words)
    if rest:
        raise UserError(f"'{rest[0]}': claim list takes only out=FOLDER")
    grid = load_claim("qq_worse").grid  # standard, at scale=small
    with open_hydra():
        pace = measure_pace(make_config({**grid, "variant": "standard", "threads": "1"}), 256)
    references = find_references(out)
    rows: list[dict[str, Any]] = []
    for name in dict.fromkeys([*claim_names(), *registered_names(out)]):
        try:
            registrations = find_registrations(out, name)
            verdicts = [
                _summarize(judgement)
                for entry in registrations
                if (judgement := counting_judgement(judge_looks(entry.claim, out, references)))
            ]
        except UserError as error:
            registrations, verdicts = [], [f"damaged: {error}"]
        if name not in claim_names() and not registrations:
            print_stderr(f"qkablate: {verdicts[0]}")
            continue
        claim = load_claim(name) if name in claim_names() else registrations[-1].claim
        rows.append(
            {
                "claim": name,
                "says": claim.says,
                "source": claim.source,
                "seeds": [*claim.seeds],
                "measures": list(dict.fromkeys(spec.of for spec in claim.parts.values())),
                "minutes": claim.minutes,
                "minutes_here": None if claim.minutes is None else round(claim.minutes * pace, 1),
                "untestable": claim.untestable,
                "verdicts": verdicts,
                "published": reuse.is_published(PUBLISHED, claim),
            }
        )
    if as_json:
        print_json(rows)
        return 0
    for row in rows:
        print("\n".join([*_format_row(row), ""]))
    print_text(
        "min: estimated minutes here at scale=small; --dry-run measures the steps of one claim"
    )
    reads_published = any(row["published"] and not row["verdicts"] for row in rows)
    print_next_commands(
        *([["claim", "list", f"out={PUBLISHED}"]] if reads_published else []),
        ["claim", "run", "directed", "--dry-run"],
    )
    return 0


def _format_row(row: dict[str, Any]) -> list[str]:
    """Return a claim of the list as lines: its verdict, what it measures, what it says, and who."""
    facts = [row["claim"]]
    if row["untestable"]:
        facts.append("not testable yet")
    else:
        state = "not run here, has published runs" if row["published"] else "not run"
        facts.append(", ".join(row["verdicts"]) or state)
        facts += [", ".join(row["measures"]), f"n = {'/'.join(map(str, row['seeds']))}"]
        minutes = row["minutes_here"]
        facts += [f"{max(1, round(minutes))} min"] if minutes is not None else []
    texts = filter(None, (row["says"], row["source"], row["untestable"]))
    screen = find_screen(sys.stdout)
    width = min(100, screen.width or 100)
    lines = textwrap.wrap(" · ".join(facts), width, subsequent_indent="  ")
    lines = [screen.paint_words(line) for line in lines]
    return lines + [f"    {line}" for text in texts for line in textwrap.wrap(text, width - 4)]


def _summarize(judgement: "Judgement") -> str:
    from qkablate.analysis.comparison.audit import MARKS, worst_state

    label = ", barring outliers" if judgement.unless else ""
    label += ", exploratory" if judgement.exploratory else ""
    mark = MARKS[worst_state([check for part in judgement.parts for check in part.checks])]
    verdict = f"{judgement.headline} {mark}".rstrip()
    keys = [f", {word}" for word in map("=".join, judgement.claim.words.items())]
    more = "".join(keys[:2]) + (f" and {len(keys) - 2} more" if len(keys) > 2 else "")
    return f"{verdict} ({judgement.claim.scale}{more}, n = {judgement.n}{label})"


def _show(request: _ClaimRequest, as_json: bool) -> int:
    from qkablate.analysis.claims.judgement import counting_judgement, judge_looks
    from qkablate.analysis.claims.registry import find_registrations
    from qkablate.analysis.publication import reuse
    from qkablate.report.text.claims import format_claim, judgement_to_json

    claim = request.claim
    looks = judge_looks(claim, request.out)
    judgement = counting_judgement(looks)
    if judgement is None:
        registered = find_registrations(request.out, claim.name)
        own = [entry for entry in registered if entry.claim.hash == claim.hash]
        if lost := [sweep for entry in own for sweep in entry.lost]:
            raise UserError(f"claim {claim.name}: its sweep '{lost[0]}' is gone")
        request.check_values()
        if as_json:
            print_json({"claim": claim.name, "scale": claim.scale, "verdict": None})
            return 1
        published = reuse.is_published(PUBLISHED, claim)
        state = f"not run yet in '{request.out}'"
        state += "" if os.path.isdir(request.out) else ", which does not exist"
        state += f"; published runs in {PUBLISHED}" * published
        for line in (*format_claim(claim), "", state):
            print_text(line, " " * 10)
        shown = ["claim", "show", claim.name, f"out={PUBLISHED}"]
        print_next_commands(
            *([shown] if published else []),
            [*request.command("run"), "--dry-run"],
            request.command("run"),
        )
        return 1
    with suppress(BrokenPipeError):
        if as_json:
            print_json(judgement_to_json(judgement))
        else:
            _print(judgement, looks, request.out)
        sys.stdout.flush()
    return 0 if judgement.has_ended else 1


def _run(request: _ClaimRequest, args: Namespace) -> int:
    from qkablate.analysis.claims import registry
    from qkablate.analysis.claims.claim import find_comparisons
    from qkablate.analysis.claims.judgement import counting_judgement, judge_looks, solo_arms
    from qkablate.analysis.publication import reuse
    from qkablate.analysis.publication.archive import refuse_archives
    from qkablate.api.sweep import plan_sweep
    from qkablate.cli.launch import run_and_print, show_plan
    from qkablate.sweeps.planning.manifest import frozen_rules

    claim = request.claim
    registrations = registry.find_registrations(request.out, claim.name)
    refuse_archives(request.out)
    folder = getattr(args, "from")
    source = ["--from", folder] if folder else []
    more = ["--more", str(args.more)] if args.more else []
    looks = _count_more(request, args.more, source) if args.more else list(claim.seeds)
    archive = None
    if folder:
        archive = reuse.find_archive(folder, claim)
        given = {**claim.words, **dict(word.split("=", 1) for word in request.run_words)}
        request.run_words += reuse.machine_settings(archive, given)
    for reason in registry.edits_since(claim, registrations):
        print_stderr(f"the verdict will be exploratory: {reason}")
    judgement: Judgement | None = None
    for seeds in looks:
        grid, words = registry.claim_grid(claim, seeds)
        with open_hydra():
            sweep_request = read_request([*words, *request.run_words], grid)
            command = [*request.command("run"), *more, *source]
            manifest, slots = plan_sweep(sweep_request, command)
        if archive is not None:
            manifest = reuse.follow_search(archive, manifest, seeds)
            if manifest.finals and frozen_rules(manifest) not in (None, manifest.tuning_rules):
                raise UserError(
                    f"{claim.name} was begun in '{request.out}' with another version of the rules"
                    " that choose learning rates than the published runs; use another out=FOLDER"
                )
        for left in manifest.left_out:
            raise UserError(f"{claim.name}: {left.arm} is left out ({left.kind}): {left.reason}")
        comparisons = find_comparisons(claim, manifest.arms.values())
        alone = solo_arms(comparisons)
        if alone and sweep_request.settings.engine.name != "local":
            raise UserError("engine: seconds and memory are measured here, with engine=local")
        if alone and any(int(arm.config.train.vmap) > 1 for arm in manifest.arms.values()):
            raise UserError(
                f"train.vmap: {claim.name} measures seconds or memory of a run alone; give 1"
            )
        if args.dry_run:
            reused = None if archive is None else reuse.count_published(archive, manifest)
            _print_plan(claim, seeds, len(comparisons), len(alone), reused)
            return show_plan(manifest, slots, sweep_request, as_json=False)
        if archive is not None:
            count = reuse.count_published(archive, manifest)
            print_text(f"{format_count(count, 'published run')} of {folder} count as done")
        try:
            published = archive.registration if archive is not None else None
            registration = registry.register_claim(claim, request.out, published)
            registration.add(seeds, manifest.folder)
            if archive is not None:
                reuse.add_runs(archive, manifest)
            code = run_and_print(manifest, slots, sweep_request, retry=args.retry is not None)
            if not code and alone:
                from qkablate.sweeps.running.solo import measure_arms

                measure_arms(manifest, alone, seeds)
        except OSError as error:
            print_stderr(f"qkablate: {error}")
            return 1
        if code:
            return code
        judged_looks = judge_looks(claim, request.out)
        judgement = counting_judgement(judged_looks)
        if judgement and judgement.is_conclusive:
            break
    assert judgement is not None
    print()
    _print(judgement, judged_looks, request.out)
    return 0


def _count_more(request: _ClaimRequest, more: int, source: list[str]) -> list[int]:
    """Return the number of seeds with `more`; UserError before the declared ones have run."""
    from qkablate.analysis.claims.judgement import judge_looks
    from qkablate.analysis.claims.parse import MOST_SEEDS
    from qkablate.analysis.claims.registry import find_registrations

    claim = request.claim
    known = {one.claim.hash for one in find_registrations(request.out, claim.name)}
    looks = judge_looks(claim, request.out) if claim.hash in known else []
    declared = [look for look in looks if look.has_ended and look.n in claim.seeds]
    if not any(look.is_conclusive or look.n == claim.seeds[-1] for look in declared):
        line = shlex.join(["qkablate", *request.command("run"), *source])
        raise UserError(f"--more: run the declared seeds first: {line}")
    count = claim.seeds[-1] + more
    if count > MOST_SEEDS:
        raise UserError(f"--more: {count:,} seeds are more than {MOST_SEEDS:,}")
    return [count]


def _print_plan(
    claim: "Claim", seeds: int, comparisons: int, alone: int, reused: int | None
) -> None:
    """Print what a claim compares; the plan of its runs follows."""
    from qkablate.report.text.claims import format_claim

    lines = [*format_claim(claim), ""]
    lines.append(f"{format_count(comparisons, 'comparison')} of {seeds} pairs")
    if alone:
        from qkablate.sweeps.running.solo import TYPICAL

        minutes = math.ceil(alone * seeds * TYPICAL / 60)
        arms = format_count(alone, "arm")
        lines.append(f"then {arms} measured alone, {seeds} times: some {minutes} min more")
    if reused is not None:
        lines.append(
            f"{format_count(reused, 'published run')} count as done, where the search chooses the"
            " published rates; the cost below is that of all runs"
        )
    for line in (*lines, ""):
        print_text(line, " " * 10)


def _print(judgement: "Judgement", looks: list["Judgement"], out: str) -> None:
    """Print the judgement that counts, and one line for each of the others."""
    from qkablate.analysis.claims.judgement import counting_judgement, judge_looks
    from qkablate.analysis.claims.registry import find_registrations
    from qkablate.report.text.claims import format_judgement

    print("\n".join(format_judgement(judgement, find_screen(sys.stdout))))
    for look in looks:
        if look is not judgement:
            summary = _summarize(look)
            if not look.has_ended:
                summary += f", {look.study.ended} of {look.study.expected} runs have ended"
            print_text(f"with {look.n} seeds: {summary}")
    for claim in (entry.claim for entry in find_registrations(out, judgement.claim.name)):
        if claim.hash != judgement.claim.hash and (
            other := counting_judgement(judge_looks(claim, out))
        ):
            print_text(f"other wording or settings: {_summarize(other)}, {claim.hash[:12]}")
    study = looks[0].study
    if commands := looks[0].resume_commands:
        print_next_commands(*commands, ["status", *study.cli_arguments])
    else:
        report = ["report", judgement.claim.folder_name, *study.cli_arguments[1:]]
        print_next_commands(["results", *study.cli_arguments], report)
