"""Successor task: its answer needs a score that is not symmetric."""

import numpy as np

from qkablate.data.tasks.base import Examples, Task
from qkablate.errors import UserError


class Directed(Task):
    """Successor task, · x · y … q: is the successor of q in the bag before it.

    The symbols form fixed cycles of length `data.cycle`, so each has a successor and a predecessor.
    A sequence is a bag of blanks and of symbols of other cycles, then the question q. With
    probability 1/3 each, the bag also contains the successor of q, its predecessor, or neither; the
    answer is yes for the successor.

    A symmetric score cannot solve it. Take one layer with one head and nothing else: no MLP, no
    skip around the attention, no positions, no bias (model.layers=1 model.heads=1
    model.mlp_ratio=0 model.attention_skip=false model.position=none). Then the logit of yes minus
    that of no is, up to a positive factor (of the softmax and the last norm),

        Σ E(q, x) c(x)        over all x: the blanks, the bag, and q itself,

    where E(q, x) = exp(score) > 0 and c(x) is the contribution of the value of x to yes. Let θ be
    the sum over q and the bag without the neighbor of q, and q⁺, q⁻ the successor and predecessor
    of q. To be right about both, with all else equal, means

        E(q, q⁺) c(q⁺) + θ > 0 > E(q, q⁻) c(q⁻) + θ,    so    E(q, q⁺) c(q⁺) > E(q, q⁻) c(q⁻).

    If the score is symmetric, E(q, q⁻) = E(q⁻, q), and with f(q) = E(q, q⁺) this is

        f(q) c(q⁺) > f(q⁻) c(q⁻)    for every q of a cycle.

    So c(q⁻) ≥ 0 implies c(q⁺) > 0, two steps further. The cycle is odd, so steps of two reach all
    of it: c is positive on the whole cycle or negative on the whole cycle. Multiplying the
    inequalities gives Π f · Π c > Π f · Π c if c is positive, Π f · Π |c| < Π f · Π |c| if it is
    negative. Both are false for any bag. So at least one of the 2 · data.cycle cases of a cycle is
    wrong, and the accuracy is at most 1 - 1/(3 · data.cycle): 8/9 for cycles of three. A score that
    is not symmetric solves the task: q scores its successor high, a blank half as high and all else
    low; c(blank) = -1, and 1 for the others.

    The bound holds for the mean over all sequences; a sample may exceed it slightly. With a skip,
    an MLP, several heads or layers the argument does not hold: earlier outputs may carry the
    direction.
    """

    name = "directed"
    summary = "does the successor of the last symbol occur before it? needs a directed score"
    difficulty = "model.context, data.vocab_size; a shorter data.cycle costs a symmetric score more"
    slice_labels = ("neither", "successor", "predecessor")
    chance = 2 / 3  # the answer is no for neither and predecessor

    def setup(self) -> int:
        size, cycle = self.setting("vocab_size"), self.setting("cycle")
        if cycle % 2 == 0:
            raise self.error("cycle", cycle, "is even; cycles must have odd length")
        if size % cycle or size < 2 * cycle:
            raise self.error(
                "vocab_size", size, f"is not a multiple of data.cycle={cycle} from {2 * cycle} on"
            )
        if self.length < 3:
            raise UserError(f"model.context: {self.length} is too short for data=directed (3)")
        self._symbols, self._cycle = size, cycle
        self._blank, self._no, self._yes = size, size + 1, size + 2
        return size + 3

    def generate(self, rng: np.random.Generator, count: int) -> Examples:
        cycle, length = self._cycle, self.length
        question_N = rng.integers(self._symbols, size=count)
        first_N = question_N - question_N % cycle
        # Symbols of other cycles, counted from the one after the question's.
        other_NB = rng.integers(self._symbols - cycle, size=(count, length - 2))
        bag_NB = (other_NB + first_N[:, None] + cycle) % self._symbols
        # A quarter of them remain on average, from none to all: some sequences are easy.
        blank_NB = rng.random((count, length - 2)) < rng.random((count, 1)) ** (1 / 3)
        bag_NB[blank_NB] = self._blank
        kind_N = rng.integers(3, size=count)
        offset_N = np.array([0, 1, -1])[kind_N]
        neighbor_N = first_N + (question_N - first_N + offset_N) % cycle
        position_N = rng.integers(length - 2, size=count)
        rows = np.flatnonzero(kind_N)
        bag_NB[rows, position_N[rows]] = neighbor_N[rows]
        blank_N1 = np.full((count, 1), self._blank)
        answer_N1 = np.where(kind_N == 1, self._yes, self._no)[:, None]
        return Examples(
            np.concatenate([blank_N1, bag_NB, question_N[:, None]], axis=1),
            answer_N1,
            np.full((count, 1), length - 1),
            {"bag": kind_N[:, None]},
        )

    def format_token(self, token: int) -> str:
        if token >= self._symbols:
            return ("·", "no", "yes")[token - self._symbols]
        cycle, place = divmod(token, self._cycle)
        return f"{cycle}{chr(ord('a') + place)}" if self._cycle <= 26 else f"{cycle}.{place}"
