"""Headers of safetensors files that lie are refused before anything is allocated or written."""

import json
import struct

import pytest

from qkablate.errors import UserError
from qkablate.pretrained.tensor_header import read_header
from tests.pretrained.hostile_models import HEADERS
from tests.pretrained.published import write_published


@pytest.fixture
def file(tmp_path):
    """Return the file of a random model."""
    write_published(tmp_path / "published")
    return tmp_path / "published" / "model.safetensors"


def test_header_names_every_tensor(file):
    header = read_header(file)
    info = header["transformer.h.1.attn.c_attn.weight"]
    assert (info.file, info.dtype, info.shape) == (file, "F32", (16, 48))
    assert len(header) == 2 + 12 * 2 + 2


@pytest.mark.parametrize("name", HEADERS)
def test_header_that_lies_is_refused(file, name):
    change, reason = HEADERS[name]
    content = file.read_bytes()
    end = 8 + struct.unpack("<Q", content[:8])[0]
    header = change(json.loads(content[8:end]))
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + content[end:])
    with pytest.raises(UserError, match=reason) as error:
        read_header(file)
    assert str(error.value).isprintable()


def test_length_of_a_header_is_bounded(file):
    for length in (2**24 + 1, 2**62, 2**64 - 1):
        with file.open("r+b") as opened:
            opened.write(struct.pack("<Q", length))
            opened.truncate(2**26)  # a sparse file
        with pytest.raises(UserError, match="not a safetensors file"):
            read_header(file)
