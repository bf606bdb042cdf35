"""Text of what models read and answer."""

from qkablate.config import DataConfig, ModelConfig
from qkablate.data import open_task
from qkablate.data.batches import PAD
from qkablate.data.pairs.sentences import TextSentences
from qkablate.data.pairs.tagged import name_tags
from qkablate.data.tokenizers import ByteTokenizer, WordTokenizer
from qkablate.data.window_texts import WindowTexts, window_texts

BYTES = TextSentences(ByteTokenizer())


def test_masks_are_one_sign_and_other_characters_whole():
    texts = WindowTexts(BYTES, mask=256)
    assert texts.read([256, *"ä".encode(), 256, 256, *b"b"]) == "▒ä▒▒b"
    assert texts.write([*b"a\n", 256], [0, 0, 0]) == r"'a' '\n' '▒'"


def test_padding_is_left_out():
    assert WindowTexts(BYTES).read([*b"ab", PAD, PAD]) == "ab"


def test_tags_stand_beside_their_words():
    tokenizer = WordTokenizer(["x", "<target>", "y", "<value>"])
    tags = name_tags(tokenizer)
    assert tags == {3: "target", 5: "value"}  # others are not in this vocabulary
    texts = WindowTexts(TextSentences(tokenizer), tags=tags)
    assert texts.read([2, 4]) == "x y"
    assert texts.write([3, 5, 4], [2, 1, 4]) == "x/target <unknown>/value y/y"


def test_tokens_of_a_task_are_as_data_show_prints_them():
    data = DataConfig(
        source="reverse", vocab_size=4, copy_length=3, val_tokens=3, test_tokens=3, tokenizer=None
    )
    texts = window_texts(open_task(data, ModelConfig(form="encoder", context=3)))
    assert texts.read([0, 4, 3]) == "s0 · s3"
    assert texts.write([3, 0], [0, 3]) == "s3 s0"
