"""Every reader for some seconds under atheris, which looks for inputs that reach new code.

    pip install atheris          # for Python 3.11; no part of the tests
    python -m tests.torture.fuzz_readers 60 FOLDER
    python -m tests.torture.fuzz_readers 60 FOLDER 'metrics.jsonl' 'claim'

An input that brings a reader down stays in the folder as crash-…, and its traceback is shown; the
exit code is 1 then.
"""

import os
import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["qkablate"]):
    from tests.torture.readers import Reader, readers


def fuzz(reader: Reader, seconds: str, folder: Path) -> bool:
    """In a child, for atheris ends its process; whether the reader stands."""
    corpus = folder / "corpus"
    corpus.mkdir(parents=True)
    (corpus / "good").write_bytes(reader.good)
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    own = [f"-max_total_time={seconds}", "-timeout=5", f"-artifact_prefix={folder}/", str(corpus)]
    atheris.Setup([sys.argv[0], *own], reader.try_)
    atheris.Fuzz()
    os._exit(0)


def main() -> int:
    seconds, folder, *names = sys.argv[1:]
    place = Path(folder).absolute()
    found = readers(place / "sweep")
    fallen = [
        name
        for name in names or found
        if not fuzz(found[name], seconds, place / name.replace(", ", "-"))
    ]
    print("\n".join(f"fallen: {name}" for name in fallen) or "every reader stands")
    return bool(fallen)


if __name__ == "__main__":
    sys.exit(main())
