"""The claims of the study: those with published runs, and those that have none yet."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from qkablate.analysis.claims.claim import Claim
from qkablate.analysis.claims.judgement import (
    Judgement,
    PartJudgement,
    counting_judgement,
    judge_looks,
)
from qkablate.analysis.claims.parse import claim_names, load_claim
from qkablate.analysis.claims.references import find_references
from qkablate.analysis.claims.registry import Registration
from qkablate.analysis.publication.archive import SUFFIX
from qkablate.analysis.publication.unpack import open_archives, unpacked_claims
from qkablate.config import Config
from qkablate.report.section import Section
from qkablate.report.study.questions import load_doubts, rank_claim
from qkablate.table import format_list

RESULTS = "results"  # the folder of the archives in that of the study


@dataclass(frozen=True)
class StudiedClaim:
    """A claim with published runs."""

    registration: Registration
    judgement: Judgement

    @property
    def claim(self) -> Claim:
        return self.registration.claim

    @property
    def slug(self) -> str:
        """Name of the claim's pictures."""
        return self.claim.folder_name

    @property
    def anchor(self) -> str:
        """Place of the claim's section on the page."""
        return self.slug.replace("_", "-")

    @property
    def doubt(self) -> str | None:
        """Reason why a part of its verdict should not be relied on, if there is one."""
        return load_doubts().get(self.slug)

    @property
    def archive(self) -> str:
        return f"{RESULTS}/{self.claim.folder_name}{SUFFIX}"

    @cached_property
    def section(self) -> Section:
        return Section(
            self.claim.title, "published runs", self.judgement.study, None, self.judgement
        )

    @property
    def verdict(self) -> str:
        """The verdict, what it is limited to, and whether it is exploratory."""
        judged = self.judgement
        if not judged.has_ended:
            return f"{judged.word} ({self.progress})"
        unless = ", barring outliers" if judged.unless else ""
        return f"{judged.headline}{unless}{' (exploratory)' if judged.exploratory else ''}"

    @property
    def progress(self) -> str:
        """Text on the runs that have ended, and on what else is missing."""
        study = self.judgement.study
        ended = f"{study.ended:,} of {study.expected:,} runs"
        return ended + ", not measured alone yet" * study.is_complete

    @property
    def deciding(self) -> list[PartJudgement]:
        """The parts, those with the verdict of the claim first; none before its verdict.

        Of these, those about loss or accuracy are first.
        """
        judged = self.judgement
        parts = judged.parts if judged.has_ended else []
        return sorted(
            parts,
            key=lambda part: (
                part.word != judged.word,
                part.comparison.spec.of not in ("gap", "accuracy"),
            ),
        )

    @property
    def data(self) -> str:
        """The data of its runs."""
        return self._each(lambda config: config.data.source)

    @property
    def positions(self) -> str:
        """The positions of its models: learned, rope, … ."""
        return self._each(lambda config: config.model.position)

    def _each(self, value: Callable[[Config], str]) -> str:
        arms = [entry.arm for entry in self.judgement.study.entries]
        return format_list(list(dict.fromkeys(value(arm.config) for arm in arms)))

    @property
    def command(self) -> str:
        """The command that trains the claim, or what is missing of it, and judges it."""
        source = [] if self.judgement.has_ended else ["--from", f"docs/study/{RESULTS}"]
        return " ".join(["qkablate", "claim", "run", *self.claim.arguments, *source])

    @property
    def minutes(self) -> float:
        """Minutes of training of all its runs, added up; vmapped ones share those of a program."""
        seconds = (record.training_seconds for record in self.judgement.study.all_records)
        return math.fsum(s for s in seconds if s is not None) / 60


def read_claims(study: Path) -> list[StudiedClaim]:
    """Read the claims of the archives in a study's folder, in the order of its questions."""
    root = open_archives(study / RESULTS)
    if root is None:
        return []
    claims = []
    references = find_references(str(root))
    for registration in unpacked_claims(root):
        judgement = counting_judgement(judge_looks(registration.claim, str(root), references))
        if judgement is not None:
            claims.append(StudiedClaim(registration, judgement))
    return sorted(
        claims,
        key=lambda studied: (rank_claim(studied.claim.name), studied.claim.folder_name),
    )


def find_open_claims(claims: list[StudiedClaim]) -> list[Claim]:
    """Return the shipped claims of which no run is published."""
    published = {studied.claim.name for studied in claims}
    names = sorted(set(claim_names()) - published, key=rank_claim)
    return [load_claim(name) for name in names]
