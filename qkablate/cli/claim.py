"""`qkablate claim`: hypotheses, written down before their runs, and their verdicts."""

import sys
from contextlib import suppress
from typing import Any

from qkablate.cli.hydra.configs import next_commands, take_flags
from qkablate.cli.results import need_analysis
from qkablate.errors import UserError, nearest, tell
from qkablate.table import counted, print_json, print_table

HELP = """qkablate claim: a hypothesis, written down before its runs, and the verdict they give.

Usage: qkablate claim list [--json]
       qkablate claim run NAME [scale=small|gpu] [key=value …] [--flag …]
       qkablate claim show NAME [scale=small|gpu] [key=value …] [--json]

NAME is a claim of `claim list`, or the path of a YAML file of your own. Keys are those of
`qkablate train`: another data set, say, makes another claim, with seeds of its own.

Verdicts
  SUPPORTED     every part's one-sided 95 % bound lies inside its margin
  REFUTED       a part's interval lies wholly outside (by Holm over the parts)
  EQUIVALENT    a part says better or worse, and its 90 % interval lies within ± its margin
  UNDERPOWERED  neither: so many seeds would settle it
  INCOMPLETE    its runs have not all ended
A verdict is `exploratory` where seeds were added beyond those declared, or the claim was edited
after runs of it. Its seeds are derived from its hash, so that no earlier run can count.

Examples
  qkablate claim list
  qkablate claim run one_head --dry-run         what it trains, and how long that takes here
  qkablate claim run one_head                   the same command goes on where it stopped
  qkablate claim show one_head                  verdict, intervals, audit, what would settle it
  qkablate claim run one_head scale=gpu
  qkablate claim run my_claim.yaml data=text data.path=book.txt

Flags
  --dry-run        show the design; train nothing, write nothing down
  --more N         N seeds beyond those declared: the verdict is exploratory from then on
  --retry failed   train failed runs again, too
  --json           with list and show

Exit codes: 0 there is a verdict · 1 some runs are not done · 2 a mistake in the command ·
128 + signal interrupted, as 130 by Ctrl-C (checkpoints written)
"""
ACTIONS = ("list", "run", "show")


def main(argv: list[str]) -> int:
    alone = ("--help", "-h", "--dry-run", "--json")
    flags, words = take_flags(argv, alone, ("--more", "--retry"))
    if {"--help", "-h"} & {*flags} or not words:
        print(HELP, end="")
        return 0
    action, *words = words
    if action not in ACTIONS:
        raise UserError(f"'{action}' is not one of {', '.join(ACTIONS)}{nearest(action, ACTIONS)}")
    allowed = {"list": ("--json",), "show": ("--json",), "run": ("--dry-run", "--more", "--retry")}
    for flag in flags:
        if flag not in allowed[action]:
            raise UserError(f"{flag} has no meaning with claim {action}")
    if flags.get("--retry", "failed") != "failed":
        raise UserError(f"--retry: takes failed, not '{flags['--retry']}'")
    need_analysis()
    if action == "list":
        return _list(words, as_json="--json" in flags)
    if not words:
        raise UserError(
            f"give a claim: qkablate claim {action} NAME; `qkablate claim list` has them"
        )
    asked = _Asked(words)
    return _show(asked, "--json" in flags) if action == "show" else _run(asked, flags)


class _Asked:
    """A claim, with the words it was asked for with."""

    def __init__(self, words: list[str]) -> None:
        from qkablate.analysis.claims.claim import FREE
        from qkablate.analysis.claims.parse import known_claims, load_claim
        from qkablate.analysis.claims.registry import registered_names, registrations
        from qkablate.config import conf_dir, keys, nearest_key

        name, *rest = words
        pairs = {}
        for word in rest:
            key, equals, value = word.partition("=")
            if not equals or not key:
                raise UserError(f"'{word}' is not key=value, as in scale=gpu or data=wikitext2")
            pairs[key] = value
        scale = pairs.pop("scale", "small")
        self.free = [
            f"{k}={v}" for k, v in pairs.items() if k in FREE or k.partition(".")[0] in FREE
        ]
        own = {k: v for k, v in pairs.items() if f"{k}={v}" not in self.free}
        for key in own:
            own_business = key.partition(".")[0] in ("sweep", "control", "seed", "seeds")
            if key not in keys() and not own_business and not (conf_dir() / key).is_dir():
                raise UserError(f"{key}: there is no such key{nearest_key(key)}")
        self.out = pairs.get("out", "outputs")
        self.words = words
        if name in registered_names(self.out) and name not in known_claims():
            self.claim = registrations(self.out, name)[-1].claim  # of a file of one's own
        else:
            self.claim = load_claim(name, scale, own)

    def command(self, action: str) -> list[str]:
        return ["claim", action, *self.words]


def _list(words: list[str], *, as_json: bool) -> int:
    from qkablate.analysis.claims.docket import judged, judgements
    from qkablate.analysis.claims.parse import known_claims, load_claim
    from qkablate.analysis.claims.registry import registered_names, registrations

    out = "outputs"
    for word in words:
        if not word.startswith("out="):
            raise UserError(f"'{word}': claim list takes out=FOLDER alone")
        out = word.removeprefix("out=")
    rows: list[dict[str, Any]] = []
    for name in dict.fromkeys([*known_claims(), *registered_names(out)]):
        try:
            found = registrations(out, name)
            known = [_short(one) for own in found if (one := judged(judgements(own.claim, out)))]
        except UserError as damaged:
            found, known = [], [f"damaged: {damaged}"]
        if name not in known_claims() and not found:
            tell(f"qkablate: {known[0]}")
            continue
        claim = load_claim(name) if name in known_claims() else found[-1].claim
        rows.append(
            {
                "claim": name,
                "says": claim.says,
                "source": claim.source,
                "seeds": [*claim.seeds],
                "untestable": claim.untestable,
                "verdicts": known,
            }
        )
    with suppress(BrokenPipeError):
        if as_json:
            print_json(rows)
            return 0
        table = [
            [
                row["claim"],
                "/".join(map(str, row["seeds"])) or "–",
                "not testable yet"
                if row["untestable"]
                else ", ".join(row["verdicts"]) or "not run",
                row["says"],
            ]
            for row in rows
        ]
        print_table(["claim", "seeds", "verdict here", "says"], table, 4, ("says", "verdict here"))
        for row in rows:
            if row["untestable"]:
                print(f"\n{row['claim']}: {row['untestable']}")
        next_commands(["claim", "run", "one_head", "--dry-run"])
    return 0


def _short(found: Any) -> str:
    from qkablate.analysis.comparison.audit import MARKS, worst

    label = ", exploratory" if found.exploratory else ""
    mark = MARKS[worst([check for one in found.judged for check in one.checks])]
    words = [found.word, *([mark] if mark else [])]
    typed = [f", {word}" for word in map("=".join, found.claim.words.items())]
    more = "".join(typed[:2]) + (f" and {len(typed) - 2} more" if len(typed) > 2 else "")
    return f"{' '.join(words)} ({found.claim.scale}{more}, n = {found.n}{label})"


def _show(asked: _Asked, as_json: bool) -> int:
    from qkablate.analysis.claims.docket import judged, judgements
    from qkablate.analysis.claims.judgement import describe
    from qkablate.report.text.claims import claim_lines

    claim = asked.claim
    if claim.untestable:
        raise UserError(f"{claim.name} is not testable yet: {claim.untestable}")
    looks = judgements(claim, asked.out)
    found = judged(looks)
    if found is None:
        if as_json:
            print_json({"claim": claim.name, "scale": claim.scale, "verdict": None})
            return 1
        print("\n".join([*claim_lines(claim), "", "not run yet"]))
        next_commands([*asked.command("run"), "--dry-run"], asked.command("run"))
        return 1
    with suppress(BrokenPipeError):
        if as_json:
            print_json(describe(found))
        else:
            _print(found, looks, asked.out)
        sys.stdout.flush()
    return 0 if found.verdict else 1


def _run(asked: _Asked, flags: dict[str, str]) -> int:
    from qkablate.analysis.claims.claim import comparisons
    from qkablate.analysis.claims.docket import judged, judgements
    from qkablate.analysis.claims.parse import MOST_SEEDS
    from qkablate.analysis.claims.registry import edited_since, grid_of, register, registrations
    from qkablate.cli.hydra.grid import composing
    from qkablate.cli.sweep import dry_run, expanded, launch
    from qkablate.report.text.claims import claim_lines

    claim = asked.claim
    if claim.untestable:
        raise UserError(f"{claim.name} is not testable yet: {claim.untestable}")
    looks = list(claim.seeds)
    if "--more" in flags:
        if not flags["--more"].isdecimal() or not int(flags["--more"]):
            raise UserError(f"--more: '{flags['--more']}' is not a number of seeds")
        known = any(one.claim.hash == claim.hash for one in registrations(asked.out, claim.name))
        before = [one for one in judgements(claim, asked.out) if one.verdict and known]
        if not any(one.is_settled or one.n == looks[-1] for one in before if one.n in looks):
            raise UserError("--more: first the seeds that were declared")
        looks = [looks[-1] + int(flags["--more"])]
        if looks[0] > MOST_SEEDS:
            raise UserError(f"--more: {looks[0]:,} seeds are more than {MOST_SEEDS:,}")
    for reason in edited_since(claim, registrations(asked.out, claim.name)):
        tell(f"exploratory, whatever comes out: {reason}")
    for seeds in looks:
        grid, words = grid_of(claim, seeds)
        with composing() as composer:
            wanted = composer.ask([*words, *asked.free], grid)
            more = ["--more", flags["--more"]] if "--more" in flags else []
            manifest, slots = expanded(wanted, composer.config, [*asked.command("run"), *more])
        for left in manifest.left_out:
            raise UserError(f"{claim.name}: {left.arm} is {left.kind}: {left.reason}")
        asks = comparisons(claim, manifest.arms.values())
        if "--dry-run" in flags:
            asked_for = counted(len(asks), "comparison")
            print("\n".join([*claim_lines(claim), "", f"{asked_for} of {seeds} pairs", ""]))
            return dry_run(manifest, slots, wanted, as_json=False)
        try:
            registration = register(claim, asked.out)
            registration.add(seeds, manifest.folder)
            code = launch(manifest, slots, wanted, retry="--retry" in flags)
        except OSError as error:
            tell(f"qkablate: {error}")
            return 1
        if code:
            return code
        looks_now = judgements(claim, asked.out)
        found = judged(looks_now)
        assert found is not None
        if found.is_settled:
            break
    with suppress(BrokenPipeError):
        print()
        _print(found, looks_now, asked.out)
    return 0


def _print(found: Any, looks: list[Any], out: str) -> None:
    """The judgement that counts, and in a line each what else was judged here."""
    from qkablate.analysis.claims.docket import judged, judgements
    from qkablate.analysis.claims.registry import registrations
    from qkablate.report.text.claims import lines

    print("\n".join(lines(found)))
    for look in looks:
        if look is not found:
            told = _short(look)
            if look.verdict is None:
                told += f", {look.study.ended} of {look.study.expected} runs have ended"
            print(f"with {look.n} seeds: {told}")
    known = [one.claim for one in registrations(out, found.claim.name)]
    for claim in known:
        if claim.hash != found.claim.hash and (other := judged(judgements(claim, out))):
            print(f"other wording or settings: {_short(other)}, {claim.hash[:12]}")
    study = looks[0].study
    if study.next_words:
        next_commands(*study.next_words, ["status", *study.where])
    else:
        where = study.where[1:]  # out=, where it is not the usual one
        next_commands(["results", *study.where], ["report", found.claim.folder_name, *where])


def words() -> list[str]:
    """What can be typed after `qkablate claim`."""
    from qkablate.config import conf_dir

    names = [path.stem for path in (conf_dir() / "claim").glob("*.yaml")]
    flags = ["--dry-run", "--more", "--retry", "--json"]
    return [*ACTIONS, *sorted(names), "scale=small", "scale=gpu", "out=", *flags]
