"""Examples of what a translator or an encoder has learned: what it reads, and its answers."""

from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass

from qkablate.data import IGNORE, Batch, Data
from qkablate.data.window_texts import WindowTexts, window_texts
from qkablate.models.answers import answer_window
from qkablate.models.base import Model
from qkablate.models.encoder_decoder import EncoderDecoder
from qkablate.models.translate import translate
from qkablate.tracking.wandb.run import LoggedTables
from qkablate.training.resolve import RunPlan

_COUNT = 10  # of the table in W&B


@dataclass(frozen=True)
class Example:
    """The text that a model reads, the right answers, and its own."""

    text: str
    answers: str
    output: str
    accuracy: float  # of the answers; of a translation: 1 if it is the target, otherwise 0
    loss: float  # nats per token of the right answers


def make_examples(model: Model, data: Data, split: str, count: int, beam: int = 1) -> list[Example]:
    """Return examples of a split, spread evenly: the same for all models that read the data."""
    batch = data.sample(split, count=count, context=model.config.context)
    texts, rows = window_texts(data), range(len(batch.targets_NA))
    training = model.training
    model.eval()
    try:
        if isinstance(model, EncoderDecoder):
            return _translate(model, batch, rows, texts, beam)
        return [answer_example(model, batch, row, texts) for row in rows]
    finally:
        model.train(training)


def _translate(
    model: EncoderDecoder, batch: Batch, rows: Iterable[int], texts: WindowTexts, beam: int
) -> list[Example]:
    sentences = texts.sentences
    pairs = [sentences.tokens.read_pair(batch, row) for row in rows]
    found = translate(model, [source for source, _ in pairs], sentences.tokens, beam)
    return [
        Example(
            sentences.decode(source),
            sentences.decode(target),
            sentences.decode(output),
            accuracy=float(output == target),
            loss=answer_window(model, batch, row)[1],
        )
        for row, (source, target), output in zip(rows, pairs, found, strict=True)
    ]


def answer_example(model: Model, batch: Batch, row: int, texts: WindowTexts) -> Example:
    """Return a row of a batch, with the answers of an encoder."""
    tokens, targets = batch.tokens_NT[row].tolist(), batch.targets_NA[row].tolist()
    words = (
        tokens
        if batch.positions_NA is None
        else batch.tokens_NT[row, batch.positions_NA[row]].tolist()
    )
    asked = [pair for pair in zip(words, targets, strict=True) if pair[1] != IGNORE]
    words, answers = [word for word, _ in asked], [target for _, target in asked]
    output, loss = answer_window(model, batch, row)
    hits = sum(map(int.__eq__, output, answers))
    return Example(
        texts.read(tokens),
        texts.write(answers, words),
        texts.write(output, words),
        accuracy=hits / len(answers),
        loss=loss,
    )


def make_example_tables(
    plan: RunPlan, model: Model, note: Callable[[str], None]
) -> LoggedTables | None:
    """Return the table of a trained model's examples; None if there is none, and note an error.

    They are of the test split, which runs that tune a learning rate do not read.
    """
    form = plan.config.model.form
    if form == "decoder" or not plan.config.train.evaluate_test:
        return None
    try:
        examples = make_examples(model, plan.data, "test", _COUNT)
    except Exception as error:  # no reason to lose a trained run
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        note(f"W&B: no table of examples: {first}")
        return None
    columns = ["text", "answers", "output", "accuracy", "nats_per_token"]
    rows = [[*astuple(example)] for example in examples]
    if form == "encoder_decoder":
        columns[:2], columns[3] = ["source", "target"], "right"
        for row in rows:
            row[3] = bool(row[3])
    return LoggedTables({"examples": (columns, rows)})
