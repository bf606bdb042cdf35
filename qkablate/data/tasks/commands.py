"""Commands and the actions that they ask for, in the manner of SCAN (Lake & Baroni, 2018).

    command = phrase, or command and phrase, or command after phrase
    phrase  = verb [[opposite | around] direction] [twice | thrice]

`x after y` does y first; a command is read from left to right. "walk left" is a turn and a step,
"walk opposite left" two turns and a step, "walk around left" four times a turn and a step.
"""

import itertools
from collections.abc import Iterable

import numpy as np

from qkablate.data.batches import PAD
from qkablate.data.tasks.base import Examples
from qkablate.data.tasks.padded import PaddedTask
from qkablate.errors import ImpossibleConfig

_VERBS = ("walk", "look", "run", "jump")
_MANNERS = ("", "left", "right", "opposite left", "opposite right", "around left", "around right")
_REPEATS = ("", "twice", "thrice")
_WORDS = (*_VERBS, "left", "right", "opposite", "around", "twice", "thrice", "and", "after")
_ACTIONS = ("WALK", "LOOK", "RUN", "JUMP", "LEFT", "RIGHT")
_TOKENS = (*_WORDS, *_ACTIONS, "end", ">")
_IDS = {token: number for number, token in enumerate(_TOKENS)}
_LONGEST_PHRASE, _MOST_ACTIONS = 4, 24  # walk around left thrice


class Commands(PaddedTask):
    """Commands and actions: walk left and jump twice > LEFT WALK JUMP JUMP end.

    Up to `data.phrases` phrases, drawn independently. Training never shows `data.held_out` of the
    combinations of a verb and a manner, such as "jump around left", but each verb and each manner
    in others. It never shows commands of up to `data.extra_phrases` more phrases, either; where
    both are held out, they take turns.
    """

    name = "commands"
    summary = "the actions of a command such as: look around left and jump twice"
    difficulty = "data.phrases, data.held_out, data.extra_phrases"
    later_keys = ("extra_phrases",)
    pair_labels = ("known", "held_out", "longer")

    def setup(self) -> int:
        if self.form == "encoder":
            raise ImpossibleConfig(
                "data: the targets of data=commands are longer than their sources, and"
                " model.form=encoder answers at the positions of its source; use"
                " model.form=decoder or encoder_decoder"
            )
        self._phrases, self._extra = self.setting("phrases"), self.config.extra_phrases or 0
        self._most = self._phrases + self._extra
        held = held_out_combinations(self.setting("held_out"))
        self._known: list[list[str]] = []
        self._held_out: list[list[str]] = []
        for verb, manner, repeat in itertools.product(_VERBS, _MANNERS, _REPEATS):
            kind = self._held_out if (verb, manner) in held else self._known
            kind.append(" ".join(filter(None, (verb, manner, repeat))).split())
        return self.prepare(
            end=_IDS["end"],
            source=(_LONGEST_PHRASE + 1) * self._most - 1,
            answers=_MOST_ACTIONS * self._most + 1,
            has_held_out=bool(held or self._extra),
        )

    def draw(self, rng: np.random.Generator, held_out_N: np.ndarray) -> Examples:
        count, shape = len(held_out_N), (len(held_out_N), self._most)
        phrases_N = rng.integers(1, self._phrases + 1, size=count)
        longer_N = held_out_N & bool(self._extra)
        if self._extra:
            if self._held_out:
                longer_N &= np.cumsum(held_out_N) % 2 == 0
            extra_N = rng.integers(1, self._extra + 1, size=count)
            phrases_N = np.where(longer_N, self._phrases + extra_N, phrases_N)
        is_special_N = held_out_N & ~longer_N
        special_N = np.where(is_special_N, rng.integers(phrases_N), -1)  # the phrase held out
        known_NP = rng.integers(len(self._known), size=shape)
        held_NP = rng.integers(max(1, len(self._held_out)), size=shape)
        is_after_NP = rng.integers(2, size=shape)
        drawn = (phrases_N, special_N, known_NP, held_NP, is_after_NP)
        commands = []
        for phrases, special, known_P, held_P, is_after_P in zip(
            *(part.tolist() for part in drawn), strict=True
        ):
            command: list[str] = []
            for n in range(phrases):
                if command:
                    command.append("after" if is_after_P[n] else "and")
                command += self._held_out[held_P[n]] if n == special else self._known[known_P[n]]
            commands.append(command)
        pair_N = held_out_N.astype(np.int64) + longer_N
        slices = {"pair": pair_N[:, None], "phrases": phrases_N[:, None]}
        answers = map(actions, commands)
        return self.join_padded(_to_tokens(commands), _to_tokens(answers), slices)

    def format_token(self, token: int) -> str:
        return _TOKENS[token]


def held_out_combinations(count: int) -> set[tuple[str, str]]:
    """Return the first `count` of 12 combinations: three of each verb, two of each manner."""
    manners = _MANNERS[1:]
    return {(_VERBS[n % 4], manners[5 * n % 6]) for n in range(count)}


def actions(command: Iterable[str]) -> list[str]:
    """Return the actions of a command."""
    done: list[str] = []
    phrase: list[str] = []
    conjunction = "and"
    for word in (*command, "and"):
        if word not in ("and", "after"):
            phrase.append(word)
            continue
        new = _phrase_actions(phrase)
        done = [*new, *done] if conjunction == "after" else [*done, *new]
        phrase, conjunction = [], word
    return done


def _phrase_actions(phrase: list[str]) -> list[str]:
    done = [phrase[0].upper()]
    turn = next((word.upper() for word in phrase if word in ("left", "right")), None)
    if turn is not None:
        turns = 2 if "opposite" in phrase else 1
        done = ([turn] * turns + done) * (4 if "around" in phrase else 1)
    return done * (3 if "thrice" in phrase else 2 if "twice" in phrase else 1)


def _to_tokens(texts: Iterable[list[str]]) -> np.ndarray:
    """Return the tokens of words or actions, padded to the longest."""
    rows = [[_IDS[word] for word in text] for text in texts]
    length = max(map(len, rows))
    return np.array([row + [PAD] * (length - len(row)) for row in rows])
