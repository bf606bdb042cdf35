"""Keys and passwords are neither written nor told; what only looks like them stays."""

import sys

import pytest

from qkablate.errors import UserError, refuse_secrets, tell
from qkablate.redaction import redacted

HEX = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a hf_abcdefghijklmnopqrstuvwxyz0123 b", "a *** b"),
        ("wandb_v1_AbCdEf0123456789abcdef_x", "***"),
        (f"+WANDB_API_KEY={HEX}\n", "+WANDB_API_KEY=***\n"),
        (f'"api_key": "{HEX}"', '"api_key": "***"'),
        (f"machine api.wandb.ai password local-{HEX}", "machine api.wandb.ai password ***"),
        ("https://me:abc@there.org/x", "https://***@there.org/x"),
    ],
)
def test_what_has_the_shape_of_a_secret_is_not_told(text, told):
    assert redacted(text) == told


@pytest.mark.parametrize(
    "text",
    [f"commit {HEX}", f"data.revision={HEX}", "hf_hub_download", "http://host:8080/a@b", "key=1"],
)
def test_what_has_not_is(text):
    assert redacted(text) == text
    refuse_secrets({"a key": text})


def test_what_the_user_has_is_not_told_whatever_its_shape(home, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "planted-in-a-variable")
    monkeypatch.setenv("HF_TOKEN", "x")  # no key, and in every text
    (home / ".netrc").write_text("machine a.org login me password planted-in-netrc\n")
    (home / ".netrc").chmod(0o600)
    (home / ".cache/huggingface").mkdir(parents=True)
    (home / ".cache/huggingface/token").write_text("planted-in-a-file\n")
    secrets = "planted-in-a-variable planted-in-netrc planted-in-a-file"
    assert redacted(f"next: {secrets}") == "next: *** *** ***"


def test_a_damaged_netrc_hinders_nobody(home):
    (home / ".netrc").write_bytes(b"\xff\xfe not one")
    assert redacted("text") == "text"


def test_a_value_that_is_a_secret_is_refused_without_repeating_it(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", HEX)
    with pytest.raises(UserError, match=r"^track.project: ") as error:
        refuse_secrets({"track.entity": "us", "track.project": ["ours", HEX]})
    assert HEX not in str(error.value)


def test_a_mistake_that_repeats_one_is_told_without(capsys):
    tell("no answer from https://me:secret@there.org")
    assert capsys.readouterr().err == "no answer from https://***@there.org\n"


def test_a_traceback_is_told_without(qkablate, monkeypatch, capfd):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    qkablate("--version")
    try:
        raise ValueError("https://me:secret@there.org")
    except ValueError as error:
        sys.excepthook(ValueError, error, error.__traceback__)
    told = capfd.readouterr().err
    assert "Traceback" in told
    assert told.endswith("ValueError: https://***@there.org\n")


def test_no_command_takes_one(qkablate, tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", HEX)
    for word in (f"track.project={HEX}", "track.project=${oc.env:WANDB_API_KEY}"):
        for verb in ("train", "sweep"):
            done = qkablate(verb, *tiny, word)
            assert done.code == 2
            assert len(done.err.splitlines()) == 1
            assert "not written down" in done.err
            assert HEX not in done.out + done.err
    assert not (tmp_path / "outputs" / "runs").exists()
