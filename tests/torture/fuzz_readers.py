"""Fuzz every reader for some seconds with atheris, which looks for inputs that reach new code.

    pip install atheris          # for Python 3.11; not part of the tests
    python -m tests.torture.fuzz_readers 60 FOLDER
    python -m tests.torture.fuzz_readers 60 FOLDER 'metrics.jsonl' 'claim'

An input that crashes a reader is kept in the folder as crash-…, and its traceback is printed; the
exit code is then 1.
"""

import os
import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["qkablate"]):
    from tests.torture.readers import Reader, make_readers


def fuzz(reader: Reader, seconds: str, folder: Path) -> bool:
    """Fuzz a reader in a child, because atheris ends its process; return whether it survived."""
    corpus = folder / "corpus"
    corpus.mkdir(parents=True)
    (corpus / "good").write_bytes(reader.good)
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    options = [
        f"-max_total_time={seconds}",
        "-timeout=5",
        f"-artifact_prefix={folder}/",
        str(corpus),
    ]
    atheris.Setup([sys.argv[0], *options], reader.try_)
    atheris.Fuzz()
    os._exit(0)


def main() -> int:
    seconds, folder, *names = sys.argv[1:]
    root = Path(folder).absolute()
    readers_by_name = make_readers(root / "sweep")
    failed = [
        name
        for name in names or readers_by_name
        if not fuzz(readers_by_name[name], seconds, root / name.replace(", ", "-"))
    ]
    print("\n".join(f"crashed: {name}" for name in failed) or "no reader crashed")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
