"""Keys and passwords lie everywhere, and what is written or told holds none of them."""

import os
import random
import shutil
import string
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import qkablate
from tests.torture.tally import Tally

SHORT, FULL = 2, 4
_BOUND = 120  # seconds: then it hangs

_CIRCUIT = '''
import os

from qkablate.attention import QK, matrix


class Tells(QK):
    """It tells all it knows when it fails."""

    equation = "B_h = 0"
    params = "d²"
    match = "none"

    def __init__(self, spec):
        super().__init__(spec)
        self.w_q, self.w_k = (matrix(spec.d_model, spec.d_model) for _ in range(2))

    def queries(self, x_BTD):
        if x_BTD.device.type != "meta":
            raise RuntimeError(" ".join(os.environ[name] for name in os.environ["TELLS"].split()))
        return x_BTD.unflatten(-1, (self.spec.heads, -1)).transpose(1, 2)

    def keys(self, y_BSD):
        return self.queries(y_BSD)
'''


class _Place:
    """A checkout, a home and an environment full of secrets, and a text to train on."""

    def __init__(self, folder: Path, draw: random.Random) -> None:
        self.folder = folder
        folder.mkdir()
        hexes = ["".join(draw.choices("0123456789abcdef", k=40)) for _ in range(4)]
        word = lambda: "".join(draw.choices(string.ascii_letters + string.digits, k=30))  # noqa: E731
        self.key, typed, *_ = hexes
        tokens = [f"hf_{word()}" for _ in range(5)]
        new = f"wandb_v1_{word()}"
        self.password = word()
        self.secrets = [*hexes[:3], *tokens, new, self.password]
        self._plant_code(f"# WANDB_API_KEY: {typed}\n# {tokens[0]} {new}\n", tokens[1])
        home = folder / "home"
        (home / ".cache" / "huggingface").mkdir(parents=True)
        (home / ".cache" / "huggingface" / "token").write_text(tokens[2])
        (home / ".netrc").write_text(f"machine api.wandb.ai login user password {hexes[2]}\n")
        (home / ".netrc").chmod(0o600)
        self.planted = {path for path in home.rglob("*") if path.is_file()}
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB_", "HF_"))}
        self.environment = {
            **kept,
            **{"HOME": str(home), "PYTHONPATH": str(folder / "code"), "WANDB_MODE": "offline"},
            **{"WANDB_API_KEY": self.key, "HF_TOKEN": tokens[3]},
            **{"HUGGING_FACE_HUB_TOKEN": tokens[4], "TELLS": "WANDB_API_KEY HF_TOKEN"},
        }
        (folder / "text.txt").write_text("the cat sat on the mat and saw two dogs\n" * 400)
        (folder / "tells.py").write_text(_CIRCUIT, encoding="utf-8")
        self.told = b""

    def _plant_code(self, line: str, token: str) -> None:
        code, own = self.folder / "code", Path(qkablate.__file__).parents[1]
        for name in ("qkablate", "conf"):
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(own / name, code / name, ignore=ignored)
        git = ["git", "-C", str(code), "-c", "user.name=a", "-c", "user.email=a@b.org"]
        remote = ["remote", "add", "origin", f"https://{token}@huggingface.co/a/b"]
        for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "all of it"], remote):
            subprocess.run([*git, *words], check=True, capture_output=True)
        for file in ("conf/train.yaml", "qkablate/models/gpt.py"):
            with (code / file).open("a") as opened:
                opened.write(line)

    def command(self, *words: str, **variables: str) -> int:
        """Its exit code; what it says is kept."""
        done = subprocess.run(
            [sys.executable, "-m", "qkablate", *words],
            cwd=self.folder / "code",
            env={**self.environment, **variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_BOUND,
        )
        self.told += done.stdout + done.stderr
        return done.returncode

    def words(self, *more: str) -> list[str]:
        """Return the overrides of a tiny run."""
        return [
            *("model.layers=1", "model.d_model=16", "model.heads=2", "model.context=16"),
            *("train.steps=4", "train.batch_size=2", "train.eval_every=4", "tracking.log_every=2"),
            *("data=text", f"data.path={self.folder}/text.txt", f"data.cache={self.folder}/cache"),
            *("data.val_tokens=64", "data.test_tokens=64", "threads=1"),
            *(f"out={self.folder}/out", *more),
        ]

    def found(self) -> list[str]:
        """Return where a secret was revealed."""
        told = self.folder / "told"
        told.write_bytes(self.told)
        found = []
        for place in ("told", "out", "cache", "home"):
            top = self.folder / place
            for path in [top] if top.is_file() else top.rglob("*"):
                if path.is_file() and path not in self.planted:
                    content = path.read_bytes()
                    if any(secret.encode() in content for secret in self.secrets):
                        found.append(str(path.relative_to(self.folder)))
        return found


def _failing(place: _Place) -> list[str]:
    """Run a sweep whose run fails with keys in its error, and every command that shows it."""
    words = place.words("variant=standard", f"variant.file=null,{place.folder}/tells.py")
    out = f"out={place.folder}/out"
    codes = [place.command("sweep", *words, "sweep.baseline=null", "seed=0", "workers=2")]
    codes += [place.command(verb, out) for verb in ("status", "results", "report")]
    failed = [path.read_bytes() for path in place.folder.glob("out/runs/*/error.txt")]
    pages = list(place.folder.glob("out/sweeps/*/*.html"))
    right = codes == [1, 1, 1, 0]  # not all of it is done
    right = right and len(failed) == 1 and b"***" in failed[0] and pages
    return [] if right else [f"sweep, status, results and report ended with {codes}"]


def _typed(place: _Place) -> list[str]:
    """Pass a key as an argument, or by something an argument refers to."""
    refused = [
        place.command(verb, *place.words(word))
        for verb, word in (
            ("train", f"tracking.project={place.key}"),
            ("sweep", f"tracking.tags=[{place.secrets[3]}]"),
            ("train", f"data.path=https://me:{place.password}@there.org/a.txt"),
            ("train", "tracking.project=${oc.env:WANDB_API_KEY}"),
        )
    ]
    wrong = [] if refused == [2] * 4 else [f"words with keys ended with {refused}"]
    return wrong + (["a traceback"] if b"Traceback" in place.told else [])


def _trained(place: _Place) -> list[str]:
    code = place.command("train", *place.words())
    (environment,) = place.folder.glob("out/runs/*/environment.json")
    if b"WANDB_API_KEY: ***" not in environment.read_bytes():
        return ["the diff of the code is not kept"]
    return [] if code == 0 else [f"train ended with {code}"]


def _unreachable(place: _Place) -> list[str]:
    """Servers whose addresses hold a password, and do not answer."""
    address = f"http://me:{place.password}@127.0.0.1:9"
    codes = [
        place.command("train", *place.words(), WANDB_MODE="online", WANDB_BASE_URL=address),
        place.command("train", "data=hub", "data.name=nobody/nothing", HF_ENDPOINT=address),
    ]
    return [] if codes == [0, 2] else [f"train without a server ended with {codes}"]


_CASES: list[Callable[[_Place], list[str]]] = [_typed, _trained, _failing, _unreachable]


def torture(cases: int, seed: int, folder: Path) -> Tally:
    tally = Tally()
    for case in range(cases):
        act = _CASES[case % len(_CASES)]
        place = _Place(folder / str(case), random.Random(f"{seed} {case}"))
        name = f"{case}: {act.__name__.strip('_')}"
        tally.cases += 1
        tally.wrong += [f"{name}: {what}" for what in act(place)]
        tally.wrong += [f"{name}: a secret in {where}" for where in place.found()]
    return tally
