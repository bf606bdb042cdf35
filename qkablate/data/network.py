"""What needs a network, with an end to waiting: retries of half a minute help nobody."""

import http.client
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PATIENCE = 2.0  # seconds until a server counts as out of reach
TOKENS_FROM = "https://openaipublic.blob.core.windows.net"


class Unreachable(Exception):
    """There is no network, or the server does not answer."""


def reachable(address: str, patience: float = PATIENCE) -> bool:
    """Whether a server answers at all, whatever it says. Looking up its name may take longer than
    any timeout, so it is asked beside us.
    """
    answered = threading.Event()

    def ask() -> None:
        try:
            with urllib.request.urlopen(
                urllib.request.Request(address, method="HEAD"), timeout=patience
            ):
                answered.set()
        except urllib.error.HTTPError:
            answered.set()
        except (OSError, ValueError, http.client.HTTPException):
            pass
        done.set()

    done = threading.Event()
    threading.Thread(target=ask, daemon=True).start()
    done.wait(patience)
    return answered.is_set()


def fetching_tokens(load: Callable[[], T]) -> T:
    """What `load` makes of tiktoken's files: from its cache, or over the network if there is
    one.
    """
    import tiktoken.load as tiktoken_load

    fetch = tiktoken_load.read_file

    def refuse(blobpath: str) -> bytes:
        raise Unreachable(f"no answer from {TOKENS_FROM}")

    tiktoken_load.read_file = refuse
    try:
        return load()
    except Unreachable:
        if not reachable(TOKENS_FROM):
            raise
    finally:
        tiktoken_load.read_file = fetch
    try:
        return load()
    except (OSError, ValueError) as error:  # it went away meanwhile, or sends something else
        raise Unreachable(str(error).splitlines()[0]) from None
