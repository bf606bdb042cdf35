"""Keys and passwords in all usual places, none of which may appear in any output."""

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
_BOUND = 120  # seconds until a command counts as hanging

_CIRCUIT = '''
import os

from qkablate.attention import QK, empty_matrix


class Tells(QK):
    """Circuit that puts environment variables into its error."""

    equation = "B_h = 0"
    params = "d²"
    match = "none"

    def __init__(self, spec):
        super().__init__(spec)
        self.w_q, self.w_k = (empty_matrix(spec.d_model, spec.d_model) for _ in range(2))

    def queries(self, x_BTD):
        if x_BTD.device.type != "meta":
            raise RuntimeError(" ".join(os.environ[name] for name in os.environ["TELLS"].split()))
        return x_BTD.unflatten(-1, (self.spec.heads, -1)).transpose(1, 2)

    def keys(self, y_BSD):
        return self.queries(y_BSD)
'''


class _World:
    """A repository, a home and an environment full of secrets, and a text to train on."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self.folder = folder
        folder.mkdir()
        keys = ["".join(rng.choices("0123456789abcdef", k=40)) for _ in range(4)]
        make_word = lambda: "".join(rng.choices(string.ascii_letters + string.digits, k=30))  # noqa: E731
        self.key, typed_key, *_ = keys
        tokens = [f"hf_{make_word()}" for _ in range(5)]
        new_key = f"wandb_v1_{make_word()}"
        self.password = make_word()
        self.secrets = [*keys[:3], *tokens, new_key, self.password]
        self._plant_code(f"# WANDB_API_KEY: {typed_key}\n# {tokens[0]} {new_key}\n", tokens[1])
        home = folder / "home"
        (home / ".cache" / "huggingface").mkdir(parents=True)
        (home / ".cache" / "huggingface" / "token").write_text(tokens[2])
        (home / ".netrc").write_text(f"machine api.wandb.ai login user password {keys[2]}\n")
        (home / ".netrc").chmod(0o600)
        self.planted = {path for path in home.rglob("*") if path.is_file()}
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB_", "HF_"))}
        self.environment = {
            **environment,
            **{"HOME": str(home), "PYTHONPATH": str(folder / "code"), "WANDB_MODE": "offline"},
            **{"WANDB_API_KEY": self.key, "HF_TOKEN": tokens[3]},
            **{"HUGGING_FACE_HUB_TOKEN": tokens[4], "TELLS": "WANDB_API_KEY HF_TOKEN"},
        }
        (folder / "text.txt").write_text("the cat sat on the mat and saw two dogs\n" * 400)
        (folder / "tells.py").write_text(_CIRCUIT, encoding="utf-8")
        self.output = b""

    def _plant_code(self, line: str, token: str) -> None:
        code, repository = self.folder / "code", Path(qkablate.__file__).parents[1]
        for name in ("qkablate", "conf"):
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(repository / name, code / name, ignore=ignored)
        git = ["git", "-C", str(code), "-c", "user.name=a", "-c", "user.email=a@b.org"]
        remote = ["remote", "add", "origin", f"https://{token}@huggingface.co/a/b"]
        for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "all of it"], remote):
            subprocess.run([*git, *words], check=True, capture_output=True)
        for file in ("conf/train.yaml", "qkablate/models/gpt.py"):
            with (code / file).open("a") as opened:
                opened.write(line)

    def command(self, *words: str, **variables: str) -> int:
        """Run a command, record its output, and return its exit code."""
        process = subprocess.run(
            [sys.executable, "-m", "qkablate", *words],
            cwd=self.folder / "code",
            env={**self.environment, **variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_BOUND,
        )
        self.output += process.stdout + process.stderr
        return process.returncode

    def words(self, *more: str) -> list[str]:
        """Return the overrides of a tiny run."""
        return [
            *("model.layers=1", "model.d_model=16", "model.heads=2", "model.context=16"),
            *("train.steps=4", "train.batch_size=2", "train.eval_every=4", "tracking.log_every=2"),
            *("data=text", f"data.path={self.folder}/text.txt", f"data.cache={self.folder}/cache"),
            *("data.val_tokens=64", "data.test_tokens=64", "threads=1"),
            *(f"out={self.folder}/out", *more),
        ]

    def find_secrets(self) -> list[str]:
        """Return where a secret was revealed."""
        output = self.folder / "told"
        output.write_bytes(self.output)
        paths = []
        for part in ("told", "out", "cache", "home"):
            top = self.folder / part
            for path in [top] if top.is_file() else top.rglob("*"):
                if path.is_file() and path not in self.planted:
                    content = path.read_bytes()
                    if any(secret.encode() in content for secret in self.secrets):
                        paths.append(str(path.relative_to(self.folder)))
        return paths


def _fail_sweep(world: _World) -> list[str]:
    """Run a sweep whose run fails with keys in its error, and every command that shows it."""
    words = world.words("variant=standard", f"variant.file=null,{world.folder}/tells.py")
    out = f"out={world.folder}/out"
    codes = [
        world.command(
            "sweep", *words, "sweep.baseline=null", "sweep.floor=false", "seed=0", "workers=2"
        )
    ]
    codes += [world.command(verb, out) for verb in ("status", "results", "report")]
    failed = [path.read_bytes() for path in world.folder.glob("out/runs/*/error.txt")]
    pages = list(world.folder.glob("out/sweeps/*/*.html"))
    is_expected = codes == [1, 1, 1, 0]  # one run failed
    is_expected = is_expected and len(failed) == 1 and b"***" in failed[0] and pages
    return [] if is_expected else [f"sweep, status, results and report ended with {codes}"]


def _type_keys(world: _World) -> list[str]:
    """Pass keys as arguments, or by interpolations in arguments."""
    codes = [
        world.command(verb, *world.words(word))
        for verb, word in (
            ("train", f"tracking.project={world.key}"),
            ("sweep", f"tracking.tags=[{world.secrets[3]}]"),
            ("train", f"data.path=https://me:{world.password}@there.org/a.txt"),
            ("train", "tracking.project=${oc.env:WANDB_API_KEY}"),
        )
    ]
    wrong = [] if codes == [2] * 4 else [f"words with keys ended with {codes}"]
    return wrong + (["a traceback"] if b"Traceback" in world.output else [])


def _train(world: _World) -> list[str]:
    code = world.command("train", *world.words())
    (environment,) = world.folder.glob("out/runs/*/environment.json")
    if b"WANDB_API_KEY: ***" not in environment.read_bytes():
        return ["the diff of the code is not recorded"]
    return [] if code == 0 else [f"train ended with {code}"]


def _use_dead_servers(world: _World) -> list[str]:
    """Use unreachable servers whose addresses contain a password."""
    address = f"http://me:{world.password}@127.0.0.1:9"
    codes = [
        world.command("train", *world.words(), WANDB_MODE="online", WANDB_BASE_URL=address),
        world.command("train", "data=hub", "data.name=nobody/nothing", HF_ENDPOINT=address),
    ]
    return [] if codes == [0, 2] else [f"train without a server ended with {codes}"]


_CASES: list[Callable[[_World], list[str]]] = [_type_keys, _train, _fail_sweep, _use_dead_servers]


def torture(cases: int, seed: int, folder: Path) -> Tally:
    tally = Tally()
    for case in range(cases):
        fault = _CASES[case % len(_CASES)]
        world = _World(folder / str(case), random.Random(f"{seed} {case}"))
        name = f"{case}: {fault.__name__.strip('_')}"
        tally.cases += 1
        tally.wrong += [f"{name}: {problem}" for problem in fault(world)]
        tally.wrong += [f"{name}: a secret in {where}" for where in world.find_secrets()]
    return tally
