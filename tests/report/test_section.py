"""Sections: their analysis is made once."""

from qkablate.analysis.comparison import gaps


def test_gaps_are_measured_once(finished, section_of, monkeypatch):
    measured, measure_gap = [], gaps.measure_gap

    def count(arm, *others):
        measured.append(arm.name)
        return measure_gap(arm, *others)

    monkeypatch.setattr(gaps, "measure_gap", count)
    section = section_of(finished)
    assert len(section.summary.gaps) == sum(len(family.gaps) for family in section.families) == 4
    assert len(measured) == 4
