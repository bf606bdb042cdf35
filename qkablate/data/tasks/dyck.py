"""Nested brackets of several kinds."""

import numpy as np

from qkablate.data.tasks.base import Examples, Task, octave, octaves
from qkablate.errors import UserError

_SIGNS = ("()", "[]", "{}", "<>")


class Dyck(Task):
    """( [ ] { ( ) } ): of which kind is the bracket that closes?

    Balanced sequences of `data.kinds` kinds of brackets, nested at most `data.depth` deep. Whether
    a bracket opens or closes next is chance; of which kind it is, when it closes, is the answer:
    that of the innermost one still open. More than half of the time that is the token just before,
    so look at the accuracy by gap and by depth.
    """

    name = "dyck"
    what = "nested brackets: of which kind is the one that closes?"
    harder = "data.depth, data.kinds, model.context"

    def size(self) -> int:
        kinds, depth = self.number("kinds"), self.number("depth")
        if self.length < 2:
            raise UserError(f"model.context: {self.length} is too short for data=dyck (2)")
        self._length = self.length - self.length % 2  # balanced sequences are even
        if depth > self._length // 2:
            raise self.refuse(
                "depth", depth, f"brackets do not fit into model.context={self.length}"
            )
        self._kinds, self._depth, self._begin = kinds, depth, 2 * kinds
        return 2 * kinds + 1

    def draw(self, rng: np.random.Generator, count: int) -> Examples:
        length = self._length
        wishes_NL = (rng.random((count, length)) < 0.5).tolist()
        tokens_NL = (2 * rng.integers(self._kinds, size=(count, length))).tolist()
        # Of every closing bracket, in their order: its place, its partner's, how deep it stands.
        closing: list[tuple[int, int, int]] = []
        for row, wishes in zip(tokens_NL, wishes_NL, strict=True):
            opened: list[int] = []
            for place, wish in enumerate(wishes):
                deep = len(opened)
                if not deep or (wish and deep < self._depth and deep < length - place):
                    opened.append(place)
                else:
                    partner = opened.pop()
                    row[place] = row[partner] + 1
                    closing.append((place, partner, deep))
        tokens_NL = np.array(tokens_NL)
        # As many close as open, so every sequence answers equally often.
        where_NA, partner_NA, depth_NA = (
            np.array(closing).reshape(count, length // 2, 3).T.swapaxes(1, 2)
        )
        begin_N1 = np.full((count, 1), self._begin)
        return Examples(
            np.concatenate([begin_N1, tokens_NL[:, :-1]], axis=1),
            np.take_along_axis(tokens_NL, where_NA, axis=1),
            np.ascontiguousarray(where_NA),
            {"depth": depth_NA, "gap": octaves(where_NA - partner_NA)},
        )

    def word(self, token: int) -> str:
        kind, closes = divmod(token, 2)
        if token == self._begin:
            return "[begin]"
        if self._kinds <= len(_SIGNS):
            return _SIGNS[kind][closes]
        return f"{')' if closes else '('}{kind}"

    def label(self, name: str, index: int) -> str:
        return str(index) if name == "depth" else octave(index)
