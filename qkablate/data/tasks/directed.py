"""A question whose answer needs a score that is not symmetric."""

import numpy as np

from qkablate.data.tasks.base import Examples, Task
from qkablate.errors import UserError

_BAGS = ("neither", "successor", "predecessor")


class Directed(Task):
    """· x · y … q: was the successor of q among them?

    The symbols stand in cycles of `data.cycle`: each has a successor and a predecessor, and they
    do not change. A sequence is a bag of blanks and of symbols of other cycles, then the question
    q. Into the bag goes, a third of the time each, the successor of q, its predecessor, or
    neither; the answer is yes for the successor.

    Why a symmetric score cannot do it. Take one layer with one head and nothing else on the way: no
    MLP, no skip around the attention, no positions, no bias (model.layers=1 model.heads=1
    model.mlp_ratio=0 model.attention_skip=false model.position=none). Then the logit of yes minus
    that of no is, up to a positive factor (of the softmax and the last norm),

        Σ E(q, x) c(x)        over all x: the blanks, the bag, and q itself,

    where E(q, x) = exp(score) > 0 and c(x) is what the value of x says for yes. Let θ be the sum
    over q and all that stands before it but its neighbour, and q⁺, q⁻ its successor and its
    predecessor. To be right about both, the rest being equal, is to have

        E(q, q⁺) c(q⁺) + θ > 0 > E(q, q⁻) c(q⁻) + θ,    so    E(q, q⁺) c(q⁺) > E(q, q⁻) c(q⁻).

    If the score is symmetric, E(q, q⁻) = E(q⁻, q), and with f(q) = E(q, q⁺) this reads

        f(q) c(q⁺) > f(q⁻) c(q⁻)    for every q of a cycle.

    So where c(q⁻) ≥ 0, c(q⁺) > 0: two steps on. The cycle is odd, two steps lead everywhere, so c
    is positive on all of it or negative on all of it. Multiply the inequalities: Π f · Π c > Π f ·
    Π c if it is positive, Π f · Π |c| < Π f · Π |c| if it is negative. Both are false, whatever
    the bags. So of the 2 · data.cycle cases of a cycle at least one is wrong, and the accuracy is
    at most 1 - 1/(3 · data.cycle): 8/9 for cycles of three. A score that is not symmetric solves
    it: q scores its successor high, a blank half as high and all else low; c(blank) = -1, and 1
    for the others.

    (The bound is one on the mean over all sequences; a sample may lie a little above.) With a skip,
    an MLP, several heads or layers the argument does not hold: what is written on the way may carry
    the direction.
    """

    name = "directed"
    what = "was the successor of the last symbol among those before? needs a score with a direction"
    harder = "model.context, data.vocab_size; a shorter data.cycle costs a symmetric score more"

    def size(self) -> int:
        size, cycle = self.number("vocab_size"), self.number("cycle")
        if cycle % 2 == 0:
            raise self.refuse("cycle", cycle, "is even; the argument is one about odd cycles")
        if size % cycle or size < 2 * cycle:
            raise self.refuse(
                "vocab_size", size, f"is not two or more cycles of data.cycle={cycle} symbols"
            )
        if self.length < 3:
            raise UserError(f"model.context: {self.length} is too short for data=directed (3)")
        self._symbols, self._cycle = size, cycle
        self._blank, self._no, self._yes = size, size + 1, size + 2
        return size + 3

    def draw(self, rng: np.random.Generator, count: int) -> Examples:
        cycle, length = self._cycle, self.length
        question_N = rng.integers(self._symbols, size=count)
        first_N = question_N - question_N % cycle
        # Of another cycle: counted from the one after the question's.
        other_NB = rng.integers(self._symbols - cycle, size=(count, length - 2))
        bag_NB = (other_NB + first_N[:, None] + cycle) % self._symbols
        # A quarter of them stay, from none to all: easy ones to begin with.
        blank_NB = rng.random((count, length - 2)) < rng.random((count, 1)) ** (1 / 3)
        bag_NB[blank_NB] = self._blank
        kind_N = rng.integers(3, size=count)
        turn_N = np.array([0, 1, -1])[kind_N]
        neighbour_N = first_N + (question_N - first_N + turn_N) % cycle
        place_N = rng.integers(length - 2, size=count)
        rows = np.flatnonzero(kind_N)
        bag_NB[rows, place_N[rows]] = neighbour_N[rows]
        blank_N1 = np.full((count, 1), self._blank)
        answer_N1 = np.where(kind_N == 1, self._yes, self._no)[:, None]
        return Examples(
            np.concatenate([blank_N1, bag_NB, question_N[:, None]], axis=1),
            answer_N1,
            np.full((count, 1), length - 1),
            {"bag": kind_N[:, None]},
        )

    def word(self, token: int) -> str:
        if token >= self._symbols:
            return ("·", "no", "yes")[token - self._symbols]
        cycle, place = divmod(token, self._cycle)
        return f"{cycle}{chr(ord('a') + place)}" if self._cycle <= 26 else f"{cycle}.{place}"

    def label(self, name: str, index: int) -> str:
        return _BAGS[index]
