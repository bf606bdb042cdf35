"""`qkablate import`: a published GPT-2 or Llama as a run."""

# ruff: noqa: N999  (the verb is a keyword of Python, and the module is imported by its name)

from qkablate.cli.arguments import (
    Parser,
    check_utf8,
    convert_value,
    out_words,
    run_and_keys,
    take_out,
    whole_number,
)
from qkablate.errors import sanitize
from qkablate.table import format_short, print_json, print_next_commands

HELP = """qkablate import: a published GPT-2 or Llama as a run.

Usage: qkablate import MODEL [as=NAME] [revision=REV] [context=N] [out=FOLDER]
                       [--json]

MODEL is gpt2, gpt2-medium, gpt2-large or gpt2-xl, OWNER/NAME on the Hub, or a
folder with config.json and model.safetensors (one file, or several with their
index). The run has the model's weights in fp32; inspect, sample, verify,
project and init_from.run= read it as any other. The same model, given again, is
not written twice.

Decoders of model_type gpt2, llama and mistral are read, with multi-head or
grouped-query attention. A model with a setting or a tensor that qkablate does
not support is refused, before anything is written. No code and no pickle is
ever read.

Without a network, the Hub's cache in HF_HOME is used. origin.json in the run's
folder has repository, commit and checksums.

Keys
  as=NAME       the beginning of the run's name (default: that of the model)
  revision=REV  a branch, tag or commit of the Hub (default: main)
  context=N     keep the first N positions only: shorter windows take less time
                and memory (default: all)
  out=outputs   the folder that holds runs/

Flags
{flags}

Examples
  qkablate import gpt2
  qkablate import gpt2 context=128 as=gpt2-short
  qkablate import HuggingFaceTB/SmolLM-135M as=smol
  qkablate import models/mine out=imported   a folder with config.json, weights

  qkablate inspect gpt2                      spectra and attention of its heads
  qkablate sample gpt2 prompt='Once upon a time'
  qkablate project gpt2 variant=shared_qk finetune.steps=100

Exit codes: 0 the run is there · 2 a mistake in the command, a model that cannot
be read, or a Hub that cannot be reached
"""
KEYS = ("as", "revision", "context")

PARSER = Parser(HELP, (), (*(f"{key}=" for key in KEYS), "out="))
PARSER.switch("--json", "print JSON")


def main(argv: list[str]) -> int:
    """Write a published model as a run."""
    args = PARSER.parse(argv)
    words, out = take_out(args.words, unpack=False)
    from qkablate.analysis.publication.archive import refuse_archives

    refuse_archives(out)
    model, values = run_and_keys(words, KEYS, "import MODEL", "model")
    for word in (model, out, *values.values()):
        check_utf8(sanitize(word), word)
    context = None
    if "context" in values:
        context = convert_value("context", values["context"], whole_number(1, 2**24))
    from qkablate.pretrained.import_run import import_run
    from qkablate.pretrained.repository import describe_origin, find_repository

    found = find_repository(model, values.get("revision"))
    run = import_run(found, out, values.get("as"), context)
    name = run.folder.name
    if args.json:
        shape = {"params": run.params, "vocabulary": run.architecture.vocabulary}
        content = {"run": name, "folder": str(run.folder), "is_new": run.is_new}
        print_json({**content, **shape, "has_tokenizer": run.has_tokenizer, "origin": run.origin})
        return 0
    sizes = run.architecture.model
    state = "" if run.is_new else " (it was imported before)"
    print(f"{sanitize(name)}{state}")
    print(f"  from      {describe_origin(run.origin)}")
    print(
        f"  model     {run.architecture.variant.name}, {sizes.layers} layers, d {sizes.d_model},"
        f" {sizes.heads} heads, context {sizes.context:,}, {format_short(run.params)} parameters"
    )
    tokens = "GPT-2's"
    if not run.has_tokenizer:
        tokens = (
            f"{run.architecture.vocabulary:,} of its own, which qkablate does not read: commands"
            " that take text refuse it"
        )
    print(f"  tokens    {tokens}")
    print(f"  folder    {sanitize(str(run.folder))}")
    rest = [name, *out_words(out)]
    commands = [["inspect", *rest]]
    if run.has_tokenizer:
        commands.append(["sample", *rest, "prompt=Once upon a time"])
        commands.append(["project", *rest, "variant=shared_qk"])
    print_next_commands(*commands)
    return 0
