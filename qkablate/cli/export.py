"""`qkablate export`: the weights of a run for transformers."""

from qkablate.cli.arguments import CIRCUIT_KEYS, Parser, restore_run, run_and_keys
from qkablate.disk import expand_user
from qkablate.errors import UserError, not_one_of, sanitize
from qkablate.table import format_short, print_json

HELP = """qkablate export: the weights of a run for Hugging Face Transformers.

Usage: qkablate export RUN FOLDER [to=hf] [key=value …] [--json]

RUN is a run's folder, or a unique beginning of its name or id; its newest
checkpoint is used. FOLDER gets config.json and model.safetensors, which
Transformers loads as GPT-2 or, for a model with RoPE, RMSNorm and SwiGLU, as
Llama, with equal logits. It must be new or empty.

A variant can be exported if its layers can be rewritten as standard attention:
no_q, shared_qk, tied_kv, gqa and others; merged matrices only if their rank is
at most d_head, as with one head. Other variants, and models with components
that GPT-2 and Llama lack, are rejected with the reason. The largest difference
of the logits of random tokens, in fp64, is printed.

Keys
  to=hf              the format (the only one)
  out=outputs        the folder that holds runs/
  variant.file=PATH  the file of the run's own circuit, if it was trained with
                     one; variant.qk=NAME and variant.ov=NAME of a package

Flags
{flags}

Examples
  qkablate export standard models/standard
  qkablate export gpt2 to=hf models/gpt2

  python -c "from transformers import AutoModelForCausalLM as M
  print(M.from_pretrained('models/standard'))"

Exit codes: 0 the folder is written · 2 a mistake in the command, or a run that
is no such model
"""
KEYS = ("to", "out", *CIRCUIT_KEYS)
_USAGE = "export RUN FOLDER"

PARSER = Parser(HELP, ("run",), [f"{key}=" for key in KEYS])
PARSER.switch("--json", "print JSON")


def main(argv: list[str]) -> int:
    """Write the weights of a run for transformers."""
    args = PARSER.parse(argv)
    runs = [word for word in args.words if "=" not in word]
    if len(runs) != 2:
        raise UserError(f"give a run and a folder: write qkablate {_USAGE}")
    keys = [word for word in args.words if "=" in word]
    run, values = run_and_keys([runs[0], *keys], KEYS, _USAGE)
    if values.get("to", "hf") != "hf":
        raise UserError(f"to: {not_one_of(values['to'], ('hf',))}")
    from qkablate.pretrained.export_run import check_target, export_run

    folder = expand_user("folder", runs[1])
    check_target(folder)
    restored = restore_run(run, values)
    exported = export_run(restored, folder)
    if args.json:
        print_json({"run": restored.folder.resolve().name, "folder": runs[1], **vars(exported)})
        return 0
    print(
        f"{sanitize(restored.folder.resolve().name)}, step {restored.step}, as {exported.family}:"
        f" {format_short(exported.params)} parameters"
    )
    print(f"  logits    differ by {exported.largest_difference:.1e} at most, in fp64")
    print(f"  folder    {sanitize(runs[1])}")
    return 0
