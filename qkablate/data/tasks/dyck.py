"""Nested brackets of several kinds."""

import numpy as np

from qkablate.data.tasks.base import Examples, Task, octave
from qkablate.errors import UserError

_BRACKETS = ("()", "[]", "{}", "<>")


class Dyck(Task):
    """Closing brackets of nested sequences: ( [ ] { ( ) } ).

    Balanced sequences of `data.kinds` kinds of brackets, nested at most `data.depth` deep. Opening
    and closing are random; the answer is the kind of each closing bracket, that of the innermost
    open one. More than half of the time that is the token just before, so the accuracy by gap and
    by depth matters.
    """

    name = "dyck"
    summary = "nested brackets: which kind closes?"
    difficulty = "data.depth, data.kinds, model.context"

    def setup(self) -> int:
        kinds, depth = self.setting("kinds"), self.setting("depth")
        if self.length < 2:
            raise UserError(f"model.context: {self.length} is too short for data=dyck (2)")
        self._length = self.length - self.length % 2  # balanced sequences are even
        if depth > self._length // 2:
            raise self.error(
                "depth", depth, f"nested brackets do not fit into model.context={self.length}"
            )
        self._kinds, self._depth, self._begin = kinds, depth, 2 * kinds
        self.chance = 1 / kinds
        return 2 * kinds + 1

    def generate(self, rng: np.random.Generator, count: int) -> Examples:
        length = self._length
        opens_NL = (rng.random((count, length)) < 0.5).tolist()
        tokens_NL = (2 * rng.integers(self._kinds, size=(count, length))).tolist()
        # Position, position of the partner and depth of every closing bracket, in order.
        closing: list[tuple[int, int, int]] = []
        for row, opens in zip(tokens_NL, opens_NL, strict=True):
            opened: list[int] = []
            for position, prefers_open in enumerate(opens):
                depth = len(opened)
                if not depth or (prefers_open and depth < min(self._depth, length - position)):
                    opened.append(position)
                else:
                    partner = opened.pop()
                    row[position] = row[partner] + 1
                    closing.append((position, partner, depth))
        tokens_NL = np.array(tokens_NL)
        # Half of the brackets close, so all sequences have the same number of answers.
        positions_NA, partner_NA, depth_NA = (
            np.array(closing).reshape(count, length // 2, 3).T.swapaxes(1, 2)
        )
        begin_N1 = np.full((count, 1), self._begin)
        return Examples(
            np.concatenate([begin_N1, tokens_NL[:, :-1]], axis=1),
            np.take_along_axis(tokens_NL, positions_NA, axis=1),
            np.ascontiguousarray(positions_NA),
            {"depth": depth_NA, "gap": octave(positions_NA - partner_NA)},
        )

    def format_token(self, token: int) -> str:
        kind, closes = divmod(token, 2)
        if token == self._begin:
            return "[begin]"
        if self._kinds <= len(_BRACKETS):
            return _BRACKETS[kind][closes]
        return f"{')' if closes else '('}{kind}"
