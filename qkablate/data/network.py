"""Network probes with timeouts."""

import http.client
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")

TIMEOUT = 2.0  # seconds until a server counts as unreachable
TOKEN_FILES_URL = "https://openaipublic.blob.core.windows.net"


class Unreachable(Exception):
    """There is no network, or the server does not answer."""


def is_reachable(address: str, timeout: float = TIMEOUT) -> bool:
    """Return whether a server answers at all, with success or with an error.

    A name lookup may take longer than any timeout, so the request runs in a thread of its own.
    """
    answered = threading.Event()

    def ask() -> None:
        with suppress(OSError, ValueError, http.client.HTTPException):
            try:
                request = urllib.request.Request(address, method="HEAD")
                urllib.request.urlopen(request, timeout=timeout).close()
            except urllib.error.HTTPError:
                pass
            answered.set()

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(timeout)
    return answered.is_set()


def with_token_files(load: Callable[[], T]) -> T:
    """Return what `load` makes of tiktoken's files, from its cache or over the network.

    tiktoken downloads without a timeout. So its download function is replaced at first, which
    leaves only its cache; the network is tried if that fails and the server answers.
    """
    import tiktoken.load as tiktoken_load

    fetch = tiktoken_load.read_file

    def refuse(blobpath: str) -> bytes:
        raise Unreachable(f"no answer from {TOKEN_FILES_URL}")

    tiktoken_load.read_file = refuse
    try:
        return load()
    except Unreachable:
        if not is_reachable(TOKEN_FILES_URL):
            raise
    finally:
        tiktoken_load.read_file = fetch
    try:
        return load()
    except (OSError, ValueError) as error:  # unreachable meanwhile, or another content
        raise Unreachable(str(error).splitlines()[0]) from None
