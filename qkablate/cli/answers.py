"""Answers of an encoder to a text, or to a split, and examples, for `qkablate sample`."""

import itertools
from argparse import Namespace
from typing import TYPE_CHECKING

from qkablate.config.data import has_masks
from qkablate.errors import UserError
from qkablate.table import format_count, format_list

if TYPE_CHECKING:
    from qkablate.data import Data
    from qkablate.data.window_texts import WindowTexts
    from qkablate.training.recorders.examples import Example
    from qkablate.training.warm_start.restore import RestoredRun

TYPED_MASK = "[MASK]"  # in a text; the sign that `data show` prints can be given, too
_SHOWN = 5  # examples of a split
_MASKS_REPORTED = 10


def answer_text(args: Namespace, restored: "RestoredRun") -> tuple[str, str]:
    """Return the answers to `args.text`, and a report in one line."""
    form, data = restored.config.model.form, restored.config.data
    if form != "encoder":
        key = "source" if form == "encoder_decoder" else "prompt"
        raise UserError(
            f"text: only a run with model.form=encoder answers a text, and this one has"
            f" model.form={form}; give {key}=TEXT"
        )
    if data.source == "stdlib_tags":
        return _tag_text(args.text, restored)
    if has_masks(data):
        return _fill_masks(args.text, restored)
    return _solve(args.text, restored)


def answer_split(args: Namespace, restored: "RestoredRun") -> tuple[str, str]:
    """Return examples of a split, and the scores of all of it in one line."""
    import torch

    from qkablate.data import EvalMetrics
    from qkablate.training.recorders.evaluation import EVAL_TOKENS

    if args.beam:
        raise UserError("--beam: only a translation has one, and this run has model.form=encoder")
    model, context, split = restored.model, restored.config.model.context, args.split
    data, totals, windows = find_data(args, restored), EvalMetrics(), 0
    size = max(1, EVAL_TOKENS["cpu"] // context)
    with torch.inference_mode():
        for batch in data.split_batches(split, batch_size=size, context=context):
            answers = batch.targets_NA, batch.positions_NA
            losses_NA, hits_NA = model.loss_and_hits(*batch.inputs, *answers)
            totals.add_answers(batch, losses_NA.numpy(), hits_NA.numpy())
            windows += int((batch.targets_NA >= 0).any(dim=1).sum())
    metrics = data.metrics(split, totals)
    report = f"{split}, {format_count(windows, 'window')}: accuracy {metrics['accuracy']:.1%}"
    if "exact" in metrics:
        report += f", exact match {metrics['exact']:.1%}"
    report += f", {metrics['loss']:.4f} nats per answer"
    return show_examples(args, restored, data), report


def show_examples(args: Namespace, restored: "RestoredRun", data: "Data") -> str:
    """Return `args.show` examples of a split."""
    from qkablate.training.recorders.examples import make_examples

    count, beam = args.show or _SHOWN, args.beam or 1
    examples = make_examples(restored.model, data, args.split, count, beam)
    return _format_examples(examples, args.split, restored.config.model.form)


def find_data(args: Namespace, restored: "RestoredRun") -> "Data":
    """Return the data of a run; UserError if it is not prepared."""
    from qkablate.training.recorders.diagnostics import find_run_data

    data = find_run_data(restored, args.values.get("data.cache", "auto"))
    if data is None:
        raise UserError(
            "--split: the run's data is not prepared on this machine; data.cache=FOLDER names"
            " another cache"
        )
    return data


def _format_examples(examples: "list[Example]", kind: str, form: str) -> str:
    """Format examples in four lines each, or more if their text has several."""
    is_pair = form == "encoder_decoder"
    labels = ("source", "target", "output") if is_pair else ("text", "answers", "output")
    lines = []
    for number, example in enumerate(examples, 1):
        share = f"{example.accuracy:.1%} right"
        if is_pair:
            share = "right" if example.accuracy else "wrong"
        unit = "token" if is_pair else "answer"
        lines.append(f"{kind} {number}: {share}, {example.loss:.4f} nats per {unit}")
        texts = (example.text, example.answers, example.output)
        for label, text in zip(labels, texts, strict=True):
            indented = text.replace("\n", f"\n{' ' * 11}")
            lines.append(f"  {label:<7}  {indented}".rstrip())
        lines.append("")
    return "\n".join(lines[:-1]) + "\n"


def _tag_text(text: str, restored: "RestoredRun") -> tuple[str, str]:
    """Tag the names of statements, whose roles Python's own parser gives."""
    import torch

    from qkablate.data import IGNORE, Batch
    from qkablate.data.pairs.roles import read_typed_statements
    from qkablate.data.pairs.tagged import name_tags
    from qkablate.training.recorders.examples import answer_example

    statements = read_typed_statements(text)
    if not statements:
        raise UserError("text: it is no Python statement with a name, such as 'x = add(y)'")
    texts = _texts(restored)
    ids_of_tags = {name: i for i, name in name_tags(restored.tokenizer()).items()}
    examples = []
    for words, tags in statements:
        ids = _encode(words, restored, texts)
        targets = [ids_of_tags.get(tag.strip("<>"), IGNORE) for tag in tags.split()]
        batch = Batch((torch.tensor([ids]),), torch.tensor([targets]))
        examples.append(answer_example(restored.model, batch, 0, texts))
    return (
        _format_examples(examples, "statement", "encoder"),
        format_count(len(examples), "statement"),
    )


def _fill_masks(text: str, restored: "RestoredRun") -> tuple[str, str]:
    """Return a text whose masks are replaced by the most likely tokens."""
    import torch

    from qkablate.data.window_texts import MASK

    texts = _texts(restored)
    parts = text.replace(TYPED_MASK, MASK).split(MASK)
    if len(parts) == 1:
        raise UserError(f"text: it has no mask; write {TYPED_MASK} for each token to fill in")
    assert texts.mask is not None
    ids = [*texts.sentences.encode(parts[0], "text")]
    for part in parts[1:]:
        ids += [texts.mask, *texts.sentences.encode(part, "text")]
    _check_length(ids, restored)
    columns = [i for i, token in enumerate(ids) if token == texts.mask]
    columns_P = torch.tensor(columns)
    with torch.inference_mode():
        log_PV = restored.model.log_probabilities(torch.tensor([ids]), columns_P * 0, columns_P)
    log_P, tokens_P = log_PV.max(dim=1)
    for column, token in zip(columns, tokens_P.tolist(), strict=True):
        ids[column] = token
    chances = zip(tokens_P.tolist(), log_P.exp().tolist(), strict=True)
    found = [f"{texts.write([token], [])} {chance:.0%}" for token, chance in chances]
    filled = f"{format_count(len(found), 'mask')}: {format_list(found, _MASKS_REPORTED)}"
    return f"{texts.read(ids)}\n", filled


def _solve(text: str, restored: "RestoredRun") -> tuple[str, str]:
    """Return the answer to the source of a task, which ends at its end token, if it has one."""
    import torch

    from qkablate.data.batches import PAD

    texts, model = _texts(restored), restored.model
    ids = _encode(text, restored, texts)
    if model.padding:  # an answer may be longer than its source
        ids += [PAD] * (model.config.context - len(ids))
    columns_P = torch.arange(len(ids))
    with torch.inference_mode():
        log_PV = model.log_probabilities(torch.tensor([ids]), columns_P * 0, columns_P)
    end = texts.sentences.tokens.end
    answer = [*itertools.takewhile(lambda token: token != end, log_PV.argmax(1).tolist())]
    return f"{texts.sentences.decode(answer)}\n", format_count(len(answer), "answer")


def _texts(restored: "RestoredRun") -> "WindowTexts":
    """Return how a run's texts are written, which its data need not be there for."""
    from qkablate.data.pairs.tagged import name_tags
    from qkablate.data.window_texts import WindowTexts

    config, sentences = restored.config, restored.sentences()
    if config.data.source == "stdlib_tags":
        return WindowTexts(sentences, tags=name_tags(restored.tokenizer()))
    mask = restored.model.vocabulary - 1 if has_masks(config.data) else None
    return WindowTexts(sentences, mask=mask)


def _encode(text: str, restored: "RestoredRun", texts: "WindowTexts") -> list[int]:
    ids = texts.sentences.encode(text, "text")
    _check_length(ids, restored)
    return ids


def _check_length(ids: list[int], restored: "RestoredRun") -> None:
    context = restored.config.model.context
    if len(ids) > context:
        raise UserError(
            f"text: it has {len(ids)} tokens, and model.context={context} of this run allows"
            f" {context}"
        )
