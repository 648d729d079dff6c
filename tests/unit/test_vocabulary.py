"""What tokens stand for, whatever way a tokenizer writes them."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, processors
from tokenizers import pre_tokenizers as splitters
from transformers import PreTrainedTokenizerFast

from paceline.engine.checkpoint import tokenizer_vocabulary
from paceline.engine.vocabulary import SENTENCEPIECE, Vocabulary, speller
from tests.checkpoints import END_OF_TEXT, tiny_tokenizer, word_tokenizer

BYTE_LEVEL = {"type": "Sequence", "decoders": [{"type": "ByteLevel"}]}
LLAMA = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ],
}


@pytest.mark.parametrize(
    ("decoder", "token", "spelling"),
    [
        (BYTE_LEVEL, "Ġthe", b" the"),
        (BYTE_LEVEL, "Ċ", b"\n"),
        (BYTE_LEVEL, "Ã©", "é".encode()),
        (BYTE_LEVEL, "ł", b"\xa0"),
        (BYTE_LEVEL, "▁", "▁".encode()),  # no character of the alphabet: added as it is
        (LLAMA, "▁the", b" the"),
        (LLAMA, "<0x0A>", b"\n"),
        (LLAMA, "é", "é".encode()),
        (SENTENCEPIECE, "▁▁", b"  "),
        (SENTENCEPIECE, "<0xfF>", b"\xff"),
        ({"type": "Metaspace", "replacement": "_"}, "▁a", "▁a".encode()),
        ({"type": "Metaspace"}, "<0x0A>", b"<0x0A>"),
        (None, "Ġ▁<0x0A>", "Ġ▁<0x0A>".encode()),
    ],
)
def test_a_token_is_spelled_as_its_family_means_it(decoder: dict[str, Any] | None, token: str, spelling: bytes) -> None:
    """Spaces, bytes and letters of each family; a sign of one family is an ordinary character to another."""
    assert speller(decoder)(token) == spelling


def test_every_byte_has_its_character_in_byte_level_writing() -> None:
    """As the library that writes such vocabularies has them."""
    spell = speller(BYTE_LEVEL)
    for byte in (b"\x00", b" ", b"~", b"\x7f", b"\xa0", b"\xad", b"\xff"):
        tokenizer = splitters.ByteLevel(add_prefix_space=False, use_regex=False)
        ((token, _),) = tokenizer.pre_tokenize_str(byte.decode("latin-1"))
        assert spell(token) == byte.decode("latin-1").encode()
    assert {spell(character) for character in splitters.ByteLevel.alphabet()} == {bytes([byte]) for byte in range(256)}


def test_tokens_of_a_byte_level_tokenizer_spell_what_it_decodes() -> None:
    """All but its special token, which is a marker under its own name."""
    tokenizer = tiny_tokenizer()
    vocabulary = tokenizer_vocabulary(tokenizer)
    end_id = tokenizer.get_vocab()[END_OF_TEXT]
    assert vocabulary.size == len(tokenizer)
    assert vocabulary.markers == frozenset((end_id,))
    assert (vocabulary.end_id, vocabulary.start_id) == (end_id, None)
    assert vocabulary.spellings[end_id] == END_OF_TEXT.encode()
    for token_id in range(vocabulary.size):
        spelled = vocabulary.spellings[token_id].decode(errors="replace")
        assert spelled == tokenizer.decode([token_id])


def sentencepiece_tokenizer(*, adds_start: bool) -> PreTrainedTokenizerFast:
    tokens = ["<unk>", "<s>", "</s>", "<0x0A>", "▁", "t", "▁t", "<think>"]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("▁", "t")], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_tokens(["<think>"])
    if adds_start:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def test_a_sentencepiece_tokenizer_is_read_with_its_roles() -> None:
    """Added tokens are written as they are, and are no markers unless they are special."""
    vocabulary = tokenizer_vocabulary(sentencepiece_tokenizer(adds_start=True))
    assert [vocabulary.spellings[token_id] for token_id in range(3, 8)] == [b"\n", b" ", b"t", b" t", b"<think>"]
    assert vocabulary.markers == {0, 1, 2}
    assert (vocabulary.unknown_id, vocabulary.start_id, vocabulary.end_id) == (0, 1, 2)


def test_a_start_token_that_is_never_put_before_a_text_is_none() -> None:
    """Some tokenizers name one that they use for something else, or for nothing."""
    assert tokenizer_vocabulary(sentencepiece_tokenizer(adds_start=False)).start_id is None


def test_words_without_a_decoder_are_written_as_they_are() -> None:
    """The tokenizers of Markov chains."""
    vocabulary = tokenizer_vocabulary(word_tokenizer(["up", "Ġdown"]))
    assert vocabulary.spellings == {0: b"up", 1: "Ġdown".encode()}


def test_a_vocabulary_below_a_limit_has_neither_tokens_nor_roles_beyond() -> None:
    """A network may know fewer tokens than its tokenizer."""
    vocabulary = Vocabulary(
        {0: b"a", 1: b"b", 2: b"c"}, frozenset({0, 2}), start_id=0, end_id=2, unknown_id=1, tokenizer_sha256="f"
    )
    assert vocabulary.below(3) is vocabulary
    assert vocabulary.below(2) == Vocabulary(
        {0: b"a", 1: b"b"}, frozenset({0}), start_id=0, end_id=None, unknown_id=1, tokenizer_sha256="f"
    )
    assert vocabulary.below(0) == Vocabulary({}, frozenset(), tokenizer_sha256="f")
