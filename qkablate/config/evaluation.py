"""Tokens that evaluations read by default: a short run spends a tenth of its time on them at most.

Counted are the evaluations of every split, and the diagnostics and predictions beside them.
"""

from qkablate.config.schema import Config

LEAST_EVAL_EVERY = 250  # steps
EVAL_COST = 0.28  # of a token in evaluation, as a part of its cost in training
_BATCH = 4096  # tokens of a forward pass on a CPU; a last one that is not full takes as long
_LEAST_VAL, _LEAST_TEST = 512, 1024
_LEAST_STEP = 320  # tokens: a step on fewer takes as long
# Tokens whose evaluation takes as long as the diagnostics and predictions of one moment; measured
# with model=nano and model=nano_translator.
_RECORDS = 10_240


def choose_eval_tokens(config: Config, steps: int, parts: int) -> tuple[int, int]:
    """Return how many tokens an evaluation of validation reads, and that of the test split.

    Validation is evaluated before the first step and after each part, and as much of the training
    split is read once. All this takes a twentieth of the training, or less where that leaves the
    test split less than a third of what is left beside diagnostics and predictions. What the user
    sets as train.eval_every plays no part, so that runs that differ in it remain pairs.
    """
    train, data = config.train, config.data
    per_step = train.batch_size * train.grad_accum * config.model.context
    records = max(1, steps / LEAST_EVAL_EVERY) + 1  # no whole number: budgets grow with the steps
    rest = steps * max(per_step, _LEAST_STEP) / 10 / EVAL_COST - records * _RECORDS
    reserved = min(steps * per_step / 20 / EVAL_COST, rest * 2 / 3)
    test = max(_LEAST_TEST, int(rest - reserved) // 1024 * 1024)
    val = int(reserved / (parts + 2))
    unit = _BATCH if test < data.test_tokens and val >= _BATCH else 1024
    val = max(_LEAST_VAL, val // unit * unit)
    return min(data.val_tokens, val), min(data.test_tokens, test)


def read_limit(config: Config, split: str) -> int | None:
    """Return how many tokens of a split an evaluation reads; None: all.

    Of the training split, as many as of the validation split. In a config that was frozen before
    there was train.test_tokens, its `auto` stands for the whole test split.
    """
    train, data = config.train, config.data
    given, whole = (
        (train.test_tokens, data.test_tokens)
        if split == "test"
        else (train.eval_tokens, data.val_tokens)
    )
    return None if isinstance(given, str) or given >= whole else given
