"""The library that makes torch's CPU build accept a CUDA device; compiled once, without torch."""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from importlib import metadata
from pathlib import Path

SOURCE = Path(__file__).with_name("guard.cpp")


def missing_reason() -> str:
    """Return why there can be no pretended GPU here; empty if there can."""
    if shutil.which("g++") is None:
        return "needs g++"
    if "+cpu" not in metadata.version("torch"):
        return "needs a build of torch without CUDA"
    return ""


def torch_folder() -> Path:
    """Return the folder of torch, which is not imported."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0])


def build_library() -> Path:
    """Compile the guard (5 s), or return what an earlier call compiled from the same source."""
    torch = torch_folder()
    content = SOURCE.read_bytes() + f"{metadata.version('torch')} {torch}".encode()
    folder = Path(tempfile.gettempdir(), f"qkablate-tests-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.lstat().st_uid != os.getuid():  # what lies there would be executed
        raise PermissionError(f"{folder} belongs to another user")
    library = folder / f"pretended-cuda-{hashlib.sha256(content).hexdigest()[:16]}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            made = Path(temporary, "guard.so")
            include = [f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}"]
            linked = [f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu"]
            command = ["g++", "-std=c++20", "-O0", "-w", "-shared", "-fPIC", *include]
            subprocess.run([*command, str(SOURCE), "-o", str(made), *linked], check=True)
            made.replace(library)
    return library
