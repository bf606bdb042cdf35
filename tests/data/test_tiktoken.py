"""OpenAI's encodings: from files that are here, or fetched, or refused in one line.

The files here are made up: they have the format of OpenAI's, and their size where it is fixed.
"""

import base64
import hashlib
import itertools
import json
import socket
import string
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from qkablate.config import DataConfig
from qkablate.data import network, tokenizers
from qkablate.data.corpus import open_corpus
from qkablate.errors import UserError
from tests.pretrained.published import write_published

URL = "https://openaipublic.blob.core.windows.net"
TEXT = "héllo the then other ∑𝄞 \r\n\n\t  12345 <|endoftext|> \u2028\x85 don't\n"
# Each merge comes after those that it is made of.
MERGES = [b"th", b"the", b" t", b" the", b"en", b"er", b"\xc3\xa9", b"ll"]
NAMES = ["gpt2", "cl100k_base", "o200k_base"]


@pytest.fixture(autouse=True)
def encodings(monkeypatch):
    """Clear the cache of tiktoken, and its hashes of the files of OpenAI."""
    import tiktoken.load
    import tiktoken.registry

    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    monkeypatch.setattr(tiktoken.load, "check_hash", lambda data, expected: bool(data))
    return tiktoken.registry


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Return an empty cache, without a network."""
    folder = tmp_path / "tiktoken"
    folder.mkdir()
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(folder))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.socket() as bound:  # nothing listens
        bound.bind(("127.0.0.1", 0))
        nowhere = f"http://127.0.0.1:{bound.getsockname()[1]}"
        monkeypatch.setattr(network, "TOKEN_FILES_URL", nowhere)
        yield folder


def files(name, merges=None):
    """Return the files that tiktoken downloads, by URL."""
    if name == "gpt2":
        return gpt2_files()
    tokens = [bytes([byte]) for byte in range(256)] + (MERGES if merges is None else merges)
    lines = (base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))
    return {f"{URL}/encodings/{name}.tiktoken": b"".join(lines)}


def gpt2_files():
    """Return 50,000 merges of letters, and of pairs of them."""
    printed = [byte for byte in range(256) if chr(byte).isprintable() and chr(byte) != " "]
    others = [byte for byte in range(256) if byte not in printed]
    spelled = [chr(byte) for byte in printed] + [chr(256 + i) for i in range(len(others))]
    pairs = list(itertools.product(string.ascii_lowercase, repeat=2))
    doubled = itertools.product(("".join(pair) for pair in pairs), repeat=2)
    merges = [*pairs, *doubled][:50_000]
    vocabulary = [*spelled, *("".join(pair) for pair in merges), "<|endoftext|>"]
    bpe = "".join(["#version: 0.2\n", *(f"{first} {second}\n" for first, second in merges)])
    ranks = json.dumps({token: rank for rank, token in enumerate(vocabulary)})
    where = f"{URL}/gpt-2/encodings/main"
    return {f"{where}/vocab.bpe": bpe.encode(), f"{where}/encoder.json": ranks.encode()}


def put(folder, found):
    """Store files like tiktoken."""
    for url, content in found.items():
        (folder / hashlib.sha1(url.encode()).hexdigest()).write_bytes(content)


@pytest.mark.parametrize("name", NAMES)
def test_cached_files_are_enough(cache, name):
    put(cache, files(name))
    tokenizer = tokenizers.load_tokenizer({"name": name})
    text = TEXT.encode() * 3
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert len(ids) < len(text)  # something was merged
    assert tokenizer.token_bytes[ids].sum() == len(text)
    assert ids.max() < tokenizer.vocabulary == len(tokenizer.token_bytes)
    assert tokenizer.decode([tokenizer.end]) == b"\0"
    assert tokenizer.end not in ids  # what looks like it in a text is text
    assert tokenizer.decode([]) == b""
    assert tokenizer.encode(b"").tolist() == []
    assert tokenizer.unknown("anything ∑") == ""


@pytest.mark.parametrize("name", NAMES)
def test_any_text_round_trips(cache, name):
    put(cache, files(name))
    tokenizer = tokenizers.load_tokenizer({"name": name})
    draws = np.random.default_rng(0)
    points = [*draws.integers(0, 0xD800, 3000), *draws.integers(0xE000, 0x110000, 3000)]
    text = "".join(map(chr, draws.permutation(points))).encode()
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_long_white_space_is_encoded(cache):
    """The stack of tiktoken alone would overflow."""
    put(cache, files("cl100k_base"))
    tokenizer = tokenizers.load_tokenizer({"name": "cl100k_base"})
    text = b" " * 2**20
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(("name", "dtype"), [("gpt2", "uint16"), ("o200k_base", "uint32")])
def test_corpus_is_prepared_with_openai_tokens(tmp_path, cache, name, dtype):
    put(cache, files(name))
    path = tmp_path / "a.txt"
    path.write_bytes(TEXT.encode() * 300)
    config = DataConfig(source="text", path=str(path), cache=str(tmp_path / "c"), tokenizer=name)
    corpus = open_corpus(config)
    assert corpus.manifest.dtype == dtype
    tokenizer = tokenizers.load_tokenizer(json.loads(json.dumps(corpus.tokenizer)))
    assert tokenizer.vocabulary == corpus.vocabulary
    parts = {split: tokenizer.decode(corpus.split(split)) for split in ("train", "val", "test")}
    assert b"".join(parts.values()) == path.read_bytes()
    assert {split: len(text) for split, text in parts.items()} == corpus.manifest.bytes


def test_documents_of_a_corpus_end_with_the_end_token(tmp_path, cache):
    put(cache, files("cl100k_base"))
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(60):
        (folder / f"{i}.txt").write_text(f"the {i}th document\n")
    base = {"source": "text", "path": str(folder), "cache": str(tmp_path / "c")}
    corpus = open_corpus(DataConfig(**base, tokenizer="cl100k_base"))
    plain = open_corpus(DataConfig(**base, tokenizer="bytes"))
    tokenizer = tokenizers.load_tokenizer(corpus.tokenizer)
    # The same text in the same order, and of the same size: so bits per byte compare.
    train = tokenizer.decode(corpus.split("train"))
    assert train == plain.split("train").tobytes()[-len(train) :]
    assert corpus.manifest.bytes["train"] == len(train)
    ends = (corpus.split("train") == tokenizer.end).sum()
    assert ends == train.count(b"\0") == corpus.manifest.documents["train"]


def test_other_tokens_of_the_same_name_are_refused(cache, encodings):
    put(cache, files("cl100k_base"))
    described = tokenizers.load_tokenizer({"name": "cl100k_base"}).describe()
    assert described["name"] == "cl100k_base"
    assert len(described["sha256"]) == 64
    assert tokenizers.load_tokenizer(described).describe() == described
    encodings.ENCODINGS.clear()
    put(cache, files("cl100k_base", [*MERGES, b"another"]))
    with pytest.raises(ValueError, match="another version of 'cl100k_base'"):
        tokenizers.load_tokenizer(described)


@pytest.mark.parametrize("name", NAMES)
def test_missing_files_are_reported_in_one_line(tmp_path, cache, name):
    with pytest.raises(UserError) as error:
        tokenizers.load_tokenizer({"name": name})
    (line,) = str(error.value).splitlines()
    assert line.startswith("data.tokenizer: ")
    assert f"'{name}'" in line
    assert "TIKTOKEN_CACHE_DIR" in line
    assert "data.tokenizer=bpe" in line
    # So is it for a whole corpus, of which nothing stays.
    (tmp_path / "a.txt").write_text("abc " * 500)
    folder = tmp_path / "c"
    base = {"source": "text", "path": str(tmp_path / "a.txt"), "cache": str(folder)}
    with pytest.raises(UserError, match="TIKTOKEN_CACHE_DIR"):
        open_corpus(DataConfig(**base, tokenizer=name))
    assert [path for path in folder.iterdir() if path.suffix != ".lock"] == []


def test_cached_files_need_no_network(cache, monkeypatch):
    put(cache, files("cl100k_base"))
    monkeypatch.setattr(network, "is_reachable", lambda *_: pytest.fail("a request was sent"))
    assert tokenizers.load_tokenizer({"name": "cl100k_base"}).vocabulary > 256


def test_files_are_downloaded_once(cache, encodings, monkeypatch):
    fetched = []
    found = files("cl100k_base")

    def fetch(url):
        fetched.append(url)
        return found[url]

    monkeypatch.setattr("tiktoken.load.read_file", fetch)
    monkeypatch.setattr(network, "is_reachable", lambda *_: True)
    described = tokenizers.load_tokenizer({"name": "cl100k_base"}).describe()
    encodings.ENCODINGS.clear()
    assert tokenizers.load_tokenizer({"name": "cl100k_base"}).describe() == described
    assert fetched == list(found)


@pytest.mark.parametrize("met", [ConnectionError("gone\nfar away"), ValueError("Hash mismatch")])
def test_failing_download_is_reported_in_one_line(cache, monkeypatch, met):
    def fetch(url):
        raise met

    monkeypatch.setattr("tiktoken.load.read_file", fetch)
    monkeypatch.setattr(network, "is_reachable", lambda *_: True)
    with pytest.raises(UserError, match="TIKTOKEN_CACHE_DIR") as error:
        tokenizers.load_tokenizer({"name": "o200k_base"})
    assert len(str(error.value).splitlines()) == 1


# Whether a server answers


@pytest.fixture
def answering(monkeypatch):
    """Start servers that answer with a status, or with other bytes."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    started = []

    def start(answer):
        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self):
                if isinstance(answer, bytes):
                    self.wfile.write(answer)
                else:
                    self.send_response(answer)
                    self.end_headers()

            def log_message(self, *_):
                pass

        server = HTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        started.append((server, thread))
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server, thread in started:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize("status", [200, 401, 404, 500])
def test_answering_server_is_reachable(answering, status):
    assert network.is_reachable(answering(status), timeout=30)


def test_missing_server_is_unreachable():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        assert not network.is_reachable(f"http://127.0.0.1:{bound.getsockname()[1]}", timeout=30)


def test_silent_server_is_unreachable():
    with socket.create_server(("127.0.0.1", 0)) as server:
        started = time.monotonic()
        assert not network.is_reachable(f"http://127.0.0.1:{server.getsockname()[1]}", timeout=0.2)
        assert time.monotonic() - started < 5


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("address", ["nothing", "http://127.0.0.1:port", "http://[", "", "no://a"])
def test_invalid_address_is_unreachable(address):
    started = time.monotonic()
    assert not network.is_reachable(address, timeout=30)
    assert time.monotonic() - started < 20


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_server_without_http_is_unreachable(answering):
    assert not network.is_reachable(answering(b"something else\r\n\r\n"), timeout=30)


def test_imported_gpt2_is_evaluated_on_its_own_tokens(qkablate, tmp_path, cache):
    """It has as many as GPT-2; the text is encoded by the files that tiktoken has here."""
    put(cache, files("gpt2"))
    model = write_published(tmp_path / "published", vocabulary=50257)
    assert qkablate("import", str(tmp_path / "published"), "as=mine").code == 0
    text = tmp_path / "a.txt"
    text.write_bytes(TEXT.encode() * 300)
    words = [f"data.path={text}", f"data.cache={tmp_path / 'c'}", "data.tokenizer=gpt2"]
    done = qkablate("eval", "mine", "data=text", *words, "--split", "val", "--json")
    assert done.code == 0, done.err
    (found,) = json.loads(done.out)["evaluations"]
    config = DataConfig(source="text", path=str(text), cache=str(tmp_path / "c"), tokenizer="gpt2")
    tokens = torch.from_numpy(open_corpus(config).split("val").astype(np.int64))
    losses = []
    for start in range(0, len(tokens) - 1, 16):  # the context of the model
        window = tokens[start : start + 17]
        with torch.no_grad():
            logits = model(window[None, :-1])[0]
        losses += F.cross_entropy(logits, window[1:], reduction="none").tolist()
    assert found["answers"] == len(losses) == len(tokens) - 1
    assert found["loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert found["loss"] == pytest.approx(np.log(50257), rel=0.2)
    size = len(tokenizers.load_tokenizer({"name": "gpt2"}).decode(tokens[1:].numpy()))
    expected = np.sum(losses) / np.log(2) / size
    assert found["bits_per_byte"] == pytest.approx(expected, rel=1e-3)


@pytest.mark.slow
def test_imported_gpt2_is_converted_on_its_own_tokens(qkablate, tmp_path, cache):
    put(cache, files("gpt2"))
    write_published(tmp_path / "published", vocabulary=50257)
    assert qkablate("import", str(tmp_path / "published"), "as=mine").code == 0
    text = tmp_path / "a.txt"
    text.write_bytes(TEXT.encode() * 300)
    words = [f"data.path={text}", f"data.cache={tmp_path / 'c'}", "data.tokenizer=gpt2"]
    words += ["data=text", "finetune.steps=2", "train.batch_size=2", "tracking.wandb=disabled"]
    done = qkablate("project", "mine", "variant=no_q", *words, "threads=1", "--json")
    assert done.code == 0, done.err
    assert qkablate("inspect", "mine", "data=text", *words[:3]).code == 0
