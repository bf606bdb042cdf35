"""Redaction of keys and passwords."""

import sys

import pytest

from qkablate.errors import UserError, print_stderr, reject_secrets
from qkablate.redaction import redact

HEX = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        ("a hf_abcdefghijklmnopqrstuvwxyz0123 b", "a *** b"),
        ("wandb_v1_AbCdEf0123456789abcdef_x", "***"),
        (f"+WANDB_API_KEY={HEX}\n", "+WANDB_API_KEY=***\n"),
        (f'"api_key": "{HEX}"', '"api_key": "***"'),
        (f"machine api.wandb.ai password local-{HEX}", "machine api.wandb.ai password ***"),
        ("https://me:abc@there.org/x", "https://***@there.org/x"),
    ],
)
def test_text_shaped_like_a_secret_is_redacted(text, redacted):
    assert redact(text) == redacted


@pytest.mark.parametrize(
    "text",
    [f"commit {HEX}", f"data.revision={HEX}", "hf_hub_download", "http://host:8080/a@b", "key=1"],
)
def test_other_text_is_kept(text):
    assert redact(text) == text
    reject_secrets({"a key": text})


def test_secrets_of_the_user_are_redacted(home, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "planted-in-a-variable")
    monkeypatch.setenv("HF_TOKEN", "x")  # too short for a key
    (home / ".netrc").write_text("machine a.org login me password planted-in-netrc\n")
    (home / ".netrc").chmod(0o600)
    (home / ".cache/huggingface").mkdir(parents=True)
    (home / ".cache/huggingface/token").write_text("planted-in-a-file\n")
    secrets = "planted-in-a-variable planted-in-netrc planted-in-a-file"
    assert redact(f"next: {secrets}") == "next: *** *** ***"


def test_damaged_netrc_is_ignored(home):
    (home / ".netrc").write_bytes(b"\xff\xfe not one")
    assert redact("text") == "text"


def test_secret_value_is_rejected_without_repeating_it(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", HEX)
    with pytest.raises(UserError, match=r"^tracking.project: ") as error:
        reject_secrets({"tracking.entity": "us", "tracking.project": ["ours", HEX]})
    assert HEX not in str(error.value)


def test_secret_in_an_error_is_redacted(capsys):
    print_stderr("no answer from https://me:secret@there.org")
    assert capsys.readouterr().err == "no answer from https://***@there.org\n"


def test_secret_in_a_traceback_is_redacted(qkablate, monkeypatch, capfd):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    qkablate("--version")
    try:
        raise ValueError("https://me:secret@there.org")
    except ValueError as error:
        sys.excepthook(ValueError, error, error.__traceback__)
    message = capfd.readouterr().err
    assert "Traceback" in message
    assert message.endswith("ValueError: https://***@there.org\n")


def test_commands_reject_secrets(qkablate, tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", HEX)
    for word in (f"tracking.project={HEX}", "tracking.project=${oc.env:WANDB_API_KEY}"):
        for verb in ("train", "sweep"):
            done = qkablate(verb, *tiny, word)
            assert done.code == 2
            assert len(done.err.splitlines()) == 1
            assert "must not be settings" in done.err
            assert HEX not in done.out + done.err
    assert not (tmp_path / "outputs" / "runs").exists()
