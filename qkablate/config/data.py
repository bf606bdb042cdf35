"""The schema of the data: which source has which keys."""

import re
from dataclasses import dataclass, replace

from qkablate.config.keys import BIG, LOCAL, Role, data_key, key, keys_by_user
from qkablate.config.sweep import as_quoted
from qkablate.errors import UserError

TEXT_SOURCES = ("stdlib", "text", "hub")
PAIRS_OF_FILES = ("stdlib_pairs", "stdlib_tags")  # each from a file that has many
PAIR_SOURCES = (*PAIRS_OF_FILES, "pairs")  # texts of sources and their targets
_HUB = ("hub", "pairs")
_FILES = ("text", "pairs")
_COPYING = ("copy", "reverse", "sort")
_PADDED_TASKS = ("add", "commands")
PADDED_SOURCES = (*_PADDED_TASKS, *PAIR_SOURCES)  # whose pairs have different lengths
PREPARED_SOURCES = (*TEXT_SOURCES, *PAIR_SOURCES)
_TASKS = ("recall", "induction", *_COPYING, "directed", "dyck", *_PADDED_TASKS)
_SOURCES = (*PREPARED_SOURCES, *_TASKS)
_OWN_VOCABULARY = ("dyck", *_PADDED_TASKS)
HELD_OUT_SPLITS = ("val", "test")
SPLITS = ("train", *HELD_OUT_SPLITS)
VOCABULARY_SIZES = {"bpe": 8192, "words": 2048}  # where data.vocab_size is null
COLUMNS = ("source_field", "target_field")  # of data=pairs, which has no default for them
HUB_KEYS = ("files", "subset", "revision", "split")  # beside data.name, and not data.path
_OPTIONAL = ("extra_phrases",)  # keys of tasks that older runs do not have
_PLACE = Role.CONTENT | Role.ARM | Role.FINETUNE


@dataclass
class DataConfig:
    """The data. Each source uses some of these keys; the others are null."""

    source: str = data_key("stdlib", "source of the data; choose it with data=…", choices=_SOURCES)
    path: str | None = key(None, "file, folder or pattern to read", _PLACE, used_by=_FILES)
    name: str | None = key(
        None, "name on the Hub, a local folder, or text, json, csv, parquet", _PLACE, used_by=_HUB
    )
    files: str | None = key(None, "path, pattern or URL", _PLACE, used_by=_HUB)
    subset: str | None = data_key(None, "configuration of a data set with several", used_by=_HUB)
    revision: str | None = data_key(None, "branch, tag or commit", used_by=_HUB)
    split: str | None = data_key(None, "split to train on; null: train", used_by=_HUB)
    field: str | None = data_key(
        None, "column that holds the text; null: text", used_by=("text", "hub")
    )
    source_field: str | None = key(
        None,
        "column that holds the sources; a.b: the part b of a column a",
        _PLACE,
        used_by=("pairs",),
    )
    target_field: str | None = key(
        None, "column that holds the targets", _PLACE, used_by=("pairs",)
    )
    max_length: int | None = data_key(
        None,
        "maximum tokens of a source, or of a target with its end token; longer pairs are left out",
        bounds=(2, 2**16),
        used_by=PAIR_SOURCES,
    )
    document_start: str | None = data_key(
        None, "regular expression: a matching row begins a new document", used_by=("hub",)
    )
    tokenizer: str | None = data_key(
        "bytes",
        "bytes, chars, bpe, gpt2, cl100k_base, o200k_base; words for stdlib_tags",
        choices=("bytes", "chars", "bpe", "gpt2", "cl100k_base", "o200k_base", "words"),
        used_by=PREPARED_SOURCES,
    )
    vocab_size: int | None = data_key(
        None,
        "vocabulary of bpe (null: 8192), of words (null: 2048) or of a task",
        bounds=(2, 2**24),
        used_by=tuple(source for source in _SOURCES if source not in _OWN_VOCABULARY),
    )
    max_tokens: int | None = data_key(
        None, "tokens to train on at most", bounds=(1, BIG), used_by=TEXT_SOURCES
    )
    objective: str | None = data_key(
        None,
        "causal: predict the next token; mlm: masked tokens, for model.form=encoder; null: causal",
        choices=("causal", "mlm"),
        used_by=TEXT_SOURCES,
    )
    pairs: int | None = data_key(
        None, "key-value pairs per sequence, at most", bounds=(1, 2**20), used_by=("recall",)
    )
    segment: int | None = data_key(
        None, "length of the repeated segment", bounds=(2, 2**20), used_by=("induction",)
    )
    copy_length: int | None = data_key(
        None, "tokens to copy, or to sort", bounds=(1, 2**20), used_by=_COPYING
    )
    cycle: int | None = data_key(
        None, "length of the cycle of symbols", bounds=(3, 2**20), used_by=("directed",)
    )
    kinds: int | None = data_key(None, "kinds of brackets", bounds=(1, 2**16), used_by=("dyck",))
    depth: int | None = data_key(
        None, "depth of nesting, at most", bounds=(1, 2**20), used_by=("dyck",)
    )
    digits: int | None = data_key(
        None, "digits of the numbers to add, at most", bounds=(1, 2**16), used_by=("add",)
    )
    extra_digits: int | None = data_key(
        None, "additional digits of numbers in the test split", bounds=(0, 64), used_by=("add",)
    )
    phrases: int | None = data_key(
        None, "phrases of a command, at most", bounds=(1, 2**10), used_by=("commands",)
    )
    held_out: int | None = data_key(
        None,
        "number of verb–manner combinations held out for the test split",
        bounds=(0, 12),
        used_by=("commands",),
    )
    extra_phrases: int | None = data_key(
        None,
        "additional phrases of commands in the test split; null: 0",
        bounds=(0, 64),
        used_by=("commands",),
    )
    val_tokens: int = data_key(
        65536, "tokens of the validation split, at most", bounds=(2, BIG), used_by=_SOURCES
    )
    test_tokens: int = data_key(
        65536, "tokens of the test split, at most", bounds=(2, BIG), used_by=_SOURCES
    )
    cache: str | None = key(
        "auto",
        "folder of prepared tokens; auto: the user's cache folder",
        LOCAL,
        used_by=PREPARED_SOURCES,
    )


DATA_KEYS = keys_by_user(DataConfig, _SOURCES)
_NEEDED = {"text": ("path", "FILE_OR_FOLDER"), "hub": ("name", "NAME_ON_THE_HUB")}


def fill_vocab_size(data: DataConfig) -> DataConfig:
    """Return the data with the default size of a vocabulary that is made from the text."""
    size = VOCABULARY_SIZES.get(str(data.tokenizer))
    return replace(data, vocab_size=size) if size and data.vocab_size is None else data


def source_words(data: DataConfig) -> dict[str, str]:
    """Return the overrides that choose a source, without its place but with its columns."""
    columns = {f"data.{key}": getattr(data, key) for key in COLUMNS}
    quoted = {key: as_quoted(value) for key, value in columns.items() if value is not None}
    return {"data": data.source, **quoted}


def has_masks(data: DataConfig) -> bool:
    """Return whether a text's masked tokens are predicted, each from both sides."""
    return data.objective == "mlm"


def loss_unit(source: str, objective: str | None) -> str:
    """Return the unit of a loss: nats per token, per answer of a task, or what else it is over."""
    if objective == "mlm":
        return "nats per masked token"
    if source in PAIR_SOURCES:
        return "nats per target token"
    return f"nats per {'token' if source in TEXT_SOURCES else 'answer'}"


def is_causal_text(data: DataConfig) -> bool:
    """Return whether each token of a text is predicted from those before, as n-grams do it."""
    return data.source in TEXT_SOURCES and not has_masks(data)


def check_data(data: DataConfig) -> None:
    """Check that every key given belongs to the source, and that no key it needs is missing."""
    source = data.source
    used = DATA_KEYS[source]
    for name, value in vars(data).items():
        if name not in ("source", *used) and value is not None:
            known = [name for name in used if name != "cache"]
            hint = " (write data=text data.path=…)" if name == "path" else ""
            raise UserError(
                f"data.{name}: data={source} has no such key{hint}; it has {', '.join(known)}"
            )
    if source in _NEEDED and not getattr(data, (needed := _NEEDED[source])[0]):
        raise UserError(f"data.{needed[0]}: data={source} needs data.{needed[0]}={needed[1]}")
    if source == "pairs":
        _check_pairs(data)
    if source not in PREPARED_SOURCES:
        for name in used:
            if getattr(data, name) is None and name not in _OPTIONAL:
                raise UserError(f"data.{name}: data={source} needs a number")
        return
    for name in ("tokenizer", "cache"):
        if not getattr(data, name):
            raise UserError(f"data.{name}: data={source} needs a value")
    _check_tokenizer(data)
    try:
        re.compile(data.document_start or "")
    except (re.error, OverflowError, RecursionError) as error:
        raise UserError(f"data.document_start: not a regular expression: {error}") from None


def _check_tokenizer(data: DataConfig) -> None:
    """Check that the tokenizer is one of the source, and that it has room for its tokens."""
    if (data.tokenizer == "words") != (data.source == "stdlib_tags"):
        needed = "needs words" if data.source == "stdlib_tags" else "has no tags of words"
        raise UserError(f"data.tokenizer: {data.tokenizer} given, but data={data.source} {needed}")
    if data.vocab_size is None:
        return
    if data.tokenizer not in VOCABULARY_SIZES:
        raise UserError(
            f"data.vocab_size: only data.tokenizer={' and '.join(VOCABULARY_SIZES)} have this key;"
            f" the vocabulary of data.tokenizer={data.tokenizer} is fixed"
        )
    if data.vocab_size < 257:
        reason = "that every tag is a token"
        if data.tokenizer == "bpe":
            reason = "256 bytes and the end of a document"
        raise UserError(f"data.vocab_size: {data.tokenizer} needs at least 257: {reason}")


def _check_pairs(data: DataConfig) -> None:
    """Check that the place and the columns of pairs are given."""
    if bool(data.path) == bool(data.name):
        raise UserError(
            "data.path: data=pairs needs either data.path=FILE_OR_FOLDER or"
            " data.name=NAME_ON_THE_HUB"
        )
    for name in HUB_KEYS:
        if data.path is not None and getattr(data, name) is not None:
            raise UserError(f"data.{name}: data.path is given, and only data.name=… has this key")
    for name in COLUMNS:
        if not getattr(data, name):
            raise UserError(f"data.{name}: data=pairs needs data.{name}=COLUMN")
    if data.source_field == data.target_field:
        raise UserError(f"data.target_field: '{data.target_field}' is the column of the sources")
