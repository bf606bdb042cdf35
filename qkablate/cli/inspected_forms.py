"""Forms of the catalogue in `qkablate inspect`: their measurement, and what is kept of it."""

from argparse import Namespace
from typing import Any

from torch import Tensor

from qkablate.analysis.study.attention_maps import show_token
from qkablate.cli.arguments import out_words
from qkablate.data import Data
from qkablate.data.progress import Progress
from qkablate.data.tokenizers import load_tokenizer
from qkablate.diagnostics.forms import measure_forms
from qkablate.errors import print_stderr
from qkablate.models.base import Model
from qkablate.runs.inspection import FILE_NAME, write_inspection
from qkablate.training import hardware
from qkablate.training.recorders.diagnostics import compute_attention_map
from qkablate.training.warm_start.restore import RestoredRun


def measure_all_forms(restored: RestoredRun, inputs: tuple[Tensor, ...]) -> dict[str, Any]:
    """Measure the forms with a progress bar; logits in fp64 where a copy of the model fits."""
    model, config = restored.model, restored.config
    shape = config.model
    layer = 64 * shape.heads * shape.d_model**2  # of a converted layer, several copies in fp64
    params = sum(parameter.numel() for parameter in model.parameters())
    is_roomy = hardware.free_memory() > 1.1 * 8 * params + layer
    bar, stages = Progress("inspect"), list[str]()

    def show(stage: str, done: int, total: int) -> None:
        if stage not in stages:
            stages.append(stage)
            bar.stage(stage, total, "steps")
        bar.update(done)

    precision = "fp64" if is_roomy else "fp32"
    try:
        forms = measure_forms(model, shape, config.variant, inputs, precision, show)
    finally:
        bar.close()
    return forms.content()


def keep_measures(
    restored: RestoredRun,
    source: str,
    row: dict[str, Any],
    forms: dict[str, Any] | None,
    text: dict[str, Any] | None = None,
) -> None:
    """Keep in the folder of an imported run what a report of it shows."""
    parts: dict[str, Any] = {"diagnostics": row, "tokens": source, "text": text}
    if forms is not None:
        parts |= {"forms": forms, "tokens_of_forms": source}
    try:
        write_inspection(restored.folder, parts)
    except OSError as error:
        path = restored.folder / FILE_NAME
        print_stderr(
            f"qkablate: '{path}' cannot be written ({error.strerror}): no report will show the"
            " measures"
        )


def map_attention(model: Model, tokens_T: Tensor, data: Data) -> dict[str, Any] | None:
    """Return the attention on the beginning of a text, with its tokens, for a report."""
    if (found := compute_attention_map(model, tokens_T, "cpu")) is None:
        return None
    shown, a_LHTT = [*map(str, found[0].tolist())], found[1]
    if data.tokenizer is not None:
        tokenizer = load_tokenizer(data.tokenizer)
        shown = [show_token(tokenizer.decode([id])) for id in found[0].tolist()]
    return {"tokens": shown, "attention": a_LHTT.tolist()}


def propose_after_forms(args: Namespace, restored: RestoredRun) -> list[list[str]]:
    """Return commands: the loss of each variant, before and after fine-tuning, and a report."""
    words, sites = [args.run, *out_words(args.out)], restored.config.variant.sites
    measured = ["variant=all", *([] if sites == "all" else [f"variant.sites={sites}"])]
    command = ["project", *words, *measured, "--table"]
    if not restored.is_imported:
        return [command]
    data = [f"{k}={v}" for k, v in args.keys.items() if k == "data" or k.startswith("data.")]
    return [[*command, *data], ["report", *words]]
