"""Measures of an imported run in its folder: of its own weights, or refused."""

import json

import pytest

from qkablate.runs.inspection import FILE_NAME, check_forms, read_inspection, write_inspection

HELD = {"scores": 0.5, "output": 0.0, "scores_H": [0.5, None], "output_H": [0.0, 0.0]}
FORM = {"variant": "no_q", "share": 0.75, "scores": 0.5, "output": 0.0, "logits": None}
FORMS = {
    "forms": [{**FORM, "layers": [HELD]}],
    "obstacles": {"uniform": "the scores do not depend on x"},
    "precision": "fp64",
    "exact_below": 1e-6,
}


@pytest.fixture
def run(tmp_path):
    write_sums(tmp_path, "a" * 64)
    return tmp_path


def write_sums(run, sha256):
    folder = run / "checkpoints" / "step-00000000"
    folder.mkdir(parents=True, exist_ok=True)
    lines = f"{'b' * 64}  progress.json\n{sha256}  weights.safetensors\n"
    (folder / "SHA256SUMS").write_text(lines)


def test_measures_of_the_same_weights_are_kept(run):
    assert read_inspection(run) is None
    write_inspection(run, {"forms": FORMS})
    write_inspection(run, {"diagnostics": {}})
    content = read_inspection(run)
    assert content == {"forms": FORMS, "diagnostics": {}, "weights": "a" * 64}


def test_measures_of_other_weights_are_refused_and_replaced(run):
    write_inspection(run, {"forms": FORMS})
    write_sums(run, "c" * 64)
    with pytest.raises(ValueError, match="other weights"):
        read_inspection(run)
    write_inspection(run, {"diagnostics": {}})
    assert read_inspection(run) == {"diagnostics": {}, "weights": "c" * 64}


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"weights": 1}', '"' + "[" * 10**5, "ü"])
def test_damaged_file_is_refused(run, text):
    (run / FILE_NAME).write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=r".+"):
        read_inspection(run)


def test_link_is_refused_and_replaced_by_a_file(run, tmp_path):
    other = tmp_path / "other.json"
    other.write_text("{}")
    (run / FILE_NAME).symlink_to(other)
    with pytest.raises(ValueError, match=r".+"):
        read_inspection(run)
    write_inspection(run, {})
    assert other.read_text() == "{}"
    assert not (run / FILE_NAME).is_symlink()


def test_forms_are_checked():
    assert check_forms(FORMS) == FORMS
    broken = [None, [], {}, {**FORMS, "forms": 3}, {**FORMS, "forms": [FORM]}]
    broken += [{**FORMS, "exact_below": "x"}, {**FORMS, "obstacles": {"a": 1}}]
    broken += [{**FORMS, "forms": []}, {**FORMS, "forms": [{**FORM, "layers": []}]}]
    for layers in ([{**HELD, "scores": "x"}], [{**HELD, "scores_H": "ab"}], [None]):
        broken.append({**FORMS, "forms": [{**FORM, "layers": layers}]})
    several = [{**FORM, "layers": [HELD]}, {**FORM, "layers": [HELD, HELD]}]
    broken.append({**FORMS, "forms": several})
    broken.append(json.loads(json.dumps(FORMS).replace("0.5", "NaN")))
    for value in broken:
        with pytest.raises(ValueError, match="inspect --variants"):
            check_forms(value)
