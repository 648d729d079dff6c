"""Text: ids in by the model's own rules, and text out token by token without ever splitting a character.

Tokenizers are built in code, one for each kind of decoder in the field. Their vocabularies hold what real ones hold
rarely and models emit all the same: single bytes, tokens across two characters, special tokens anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from orchestrator.text import REPLACEMENT_MARK, IncrementalDetokenizer, Tokenizer
from paceline.engine.checkpoint import tokenizer_fingerprint
from paceline.errors import InvalidRequest, ModelUnavailable

SPECIAL_TOKENS = ["<s>", "</s>", "<tool>"]
WORDS = ["hello", "world", ".", "a", "\ufffd"]
TRICKY_TEXT = "naïve 你好 👩‍👩‍👧 é 🇩🇪 ₿ नि"


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """Like GPT-2: every byte is a token, and so are some runs of bytes that begin or end inside a character."""
    runs = [bytes([byte]) for byte in range(256)]
    runs += [
        b"hello",
        b" world",
        b"END",
        "你".encode(),
        "👩".encode(),
        b"\x9f\x98\xf0",
        b"\xf0\x9f",
        b"\x98\x80!",
        b"\x80\x80",
        b"!\xff\xff",
    ]
    backend = Backend(models.BPE(vocab=_numbered([_byte_level_string(run) for run in runs]), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return _wrapped(backend)


def sentencepiece_tokenizer(*, drops_first_space: bool = True) -> PreTrainedTokenizerFast:
    """Like Llama 2 and (with the first space kept) Gemma: words with a leading mark, unknown characters as bytes."""
    tokens = [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", "▁▁", *WORDS, *(f"▁{word}" for word in WORDS)]
    backend = Backend(models.BPE(vocab=_numbered(tokens), merges=[], byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps + ([decoders.Strip(" ", 1, 0)] if drops_first_space else []))
    return _wrapped(backend)


def metaspace_tokenizer() -> PreTrainedTokenizerFast:
    """Like T5: the mark of the first word gives no space."""
    tokens = ["<unk>", "▁", "▁▁", *WORDS, *(f"▁{word}" for word in WORDS)]
    backend = Backend(models.WordLevel(vocab=_numbered(tokens), unk_token="<unk>"))
    backend.decoder = decoders.Metaspace()
    return _wrapped(backend)


def word_piece_tokenizer() -> PreTrainedTokenizerFast:
    """Like BERT: spaces between tokens, none before `##` and punctuation."""
    tokens = ["<unk>", *WORDS, *(f"##{word}" for word in WORDS), "n't"]
    backend = Backend(models.WordPiece(vocab=_numbered(tokens), unk_token="<unk>"))
    backend.decoder = decoders.WordPiece(cleanup=True)
    return _wrapped(backend)


def word_suffix_tokenizer() -> PreTrainedTokenizerFast:
    """Like CLIP: the end of a word is marked, and gives a space unless it ends the text."""
    backend = Backend(models.BPE(vocab=_numbered([*WORDS, *(f"{word}</w>" for word in WORDS)]), merges=[]))
    backend.decoder = decoders.BPEDecoder(suffix="</w>")
    return _wrapped(backend)


def word_level_tokenizer() -> PreTrainedTokenizerFast:
    """No decoder at all: tokens are joined by spaces. Some ids are not in use."""
    vocabulary = _numbered(["<unk>", *WORDS]) | {"last": 20}
    return _wrapped(Backend(models.WordLevel(vocab=vocabulary, unk_token="<unk>")))


def python_tokenizer() -> PreTrainedTokenizerBase:
    """Written in Python: bytes that are no character have no text, and ids beyond the vocabulary raise an error."""
    return ByT5Tokenizer()


KINDS: dict[str, Callable[[], PreTrainedTokenizerBase]] = {
    "byte level": byte_level_tokenizer,
    "sentencepiece": sentencepiece_tokenizer,
    "sentencepiece, first space kept": lambda: sentencepiece_tokenizer(drops_first_space=False),
    "metaspace": metaspace_tokenizer,
    "word piece": word_piece_tokenizer,
    "word suffix": word_suffix_tokenizer,
    "word level": word_level_tokenizer,
    "python": python_tokenizer,
}


def _numbered(tokens: Sequence[str]) -> dict[str, int]:
    return {token: token_id for token_id, token in enumerate(tokens)}


def _byte_level_string(run: bytes) -> str:
    """The printable spelling of bytes that byte-level vocabularies use (GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return "".join(chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in run)


def _wrapped(backend: Backend) -> PreTrainedTokenizerFast:
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    backend.add_tokens([AddedToken("<visible>", special=False)])
    return _for_transformers(backend)


def _for_transformers(backend: Backend) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")  # type: ignore[no-untyped-call]


def detokenize(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """The pieces of the tokens one by one, and the flush behind them."""
    detokenizer = IncrementalDetokenizer(tokenizer)
    return [detokenizer.push(token_id) for token_id in ids] + [detokenizer.flush()]


class RecordingTokenizer(Tokenizer):
    """Remembers how many tokens each decode was given."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.decode_lengths: list[int] = []
        super().__init__(tokenizer)

    def decode(self, ids: Sequence[int]) -> str:
        self.decode_lengths.append(len(ids))
        return super().decode(ids)


TOKENIZERS = {kind: Tokenizer(build()) for kind, build in KINDS.items()}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=200, deadline=None, derandomize=True)
@given(data=st.data())
def test_pieces_join_to_the_full_decode_of_any_tokens(kind: str, data: st.DataObject) -> None:
    """200 drawn sequences a tokenizer, unknown ids among them: exact equality, so no failure is by chance."""
    tokenizer = TOKENIZERS[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=30))
    pieces = detokenize(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert not any(piece.endswith(REPLACEMENT_MARK) for piece in pieces[:-1])


@pytest.mark.parametrize("kind", ["byte level", "sentencepiece"])
@settings(max_examples=200, deadline=None, derandomize=True)
@given(data=st.data())
def test_pieces_join_to_the_full_decode_of_broken_characters(kind: str, data: st.DataObject) -> None:
    """200 drawn sequences a tokenizer from bytes that begin or continue characters, some special tokens between."""
    tokenizer = TOKENIZERS[kind]
    pool = [*b"\xf0\x9f\x98\x80\xe4\xbd\xa0\xc3\xff\xed\xef\xbf\xbdA ", *range(256, tokenizer.vocab_size)]
    ids = data.draw(st.lists(st.sampled_from(pool), max_size=40))
    pieces = detokenize(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert not any(piece.endswith(REPLACEMENT_MARK) for piece in pieces[:-1])


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=200, deadline=None, derandomize=True)
@given(data=st.data())
def test_what_was_given_out_and_what_is_pending_is_the_text_so_far(kind: str, data: st.DataObject) -> None:
    """200 drawn sequences a tokenizer: at every token nothing is missing but marks at the very end."""
    tokenizer = TOKENIZERS[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=20))
    detokenizer = IncrementalDetokenizer(tokenizer)
    given_out = ""
    for length, token_id in enumerate(ids, start=1):
        given_out += detokenizer.push(token_id)
        assert given_out + detokenizer.pending == tokenizer.decode(ids[:length]).rstrip(REPLACEMENT_MARK)


def test_each_character_comes_out_with_its_last_byte() -> None:
    """One byte a token, with emoji, CJK and combining marks: a character is neither early nor late."""
    pieces = detokenize(TOKENIZERS["byte level"], list(TRICKY_TEXT.encode()))
    expected = [piece for character in TRICKY_TEXT for piece in [""] * (len(character.encode()) - 1) + [character]]
    assert pieces == [*expected, ""]


def test_special_token_inside_a_character_does_not_break_it() -> None:
    """Special tokens have no text, so the bytes around one are neighbours."""
    tokenizer = TOKENIZERS["byte level"]
    special_id = tokenizer.vocab_size - 4
    assert not tokenizer.is_visible(special_id)
    assert detokenize(tokenizer, [0xF0, 0x9F, special_id, 0x98, 0x80]) == ["", "", "", "", "😀", ""]


def test_space_behind_a_special_token_is_kept() -> None:
    """A word behind a special token is not the first of the text."""
    tokenizer = TOKENIZERS["metaspace"]
    word, special_id = tokenizer.encode("▁hello")[-1], tokenizer.vocab_size - 4
    assert detokenize(tokenizer, [word, special_id, word])[:3] == ["hello", "", " hello"]


def test_unfinished_character_at_the_end_is_one_mark() -> None:
    """The flush gives what the full decode gives."""
    assert detokenize(TOKENIZERS["byte level"], [*b"A", 0xF0, 0x9F])[-1] == REPLACEMENT_MARK


def test_invalid_bytes_inside_stay_marks() -> None:
    """Bytes that can be no character any more come out as marks, with the next real character."""
    assert detokenize(TOKENIZERS["byte level"], [0xFF, 0x80, *b"A"]) == ["", "", "\ufffd\ufffdA", ""]


def test_newline_of_a_byte_vocabulary_is_pending_at_once() -> None:
    """Fallback bytes come out when their run is over, but a stop string need not wait for that."""
    tokenizer = TOKENIZERS["sentencepiece"]
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert (detokenizer.push(0x0A), detokenizer.pending) == ("", "\n")
    assert (detokenizer.push(0xF0), detokenizer.pending) == ("", "")  # one bad byte spoils the whole run
    assert detokenizer.flush() == tokenizer.decode([0x0A, 0xF0]) == "\ufffd\ufffd"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cycle", [[0x80], [0xF0], [0xFF, 0x41], [0x41], [1], [1, 2, 3]])
def test_cost_of_a_token_does_not_grow(kind: str, cycle: list[int]) -> None:
    """2,000 tokens, among them bytes that never become a character: few decodes, each of a few tokens."""
    tokenizer = RecordingTokenizer(KINDS[kind]())
    ids = [token_id % tokenizer.vocab_size for token_id in cycle * 2000][:2000]
    tokenizer.decode_lengths.clear()
    text = "".join(detokenize(tokenizer, ids))
    assert max(tokenizer.decode_lengths, default=0) <= 7
    assert len(tokenizer.decode_lengths) <= 2 * len(ids)
    assert text == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", ["byte level", "sentencepiece", "sentencepiece, first space kept"])
def test_tokens_of_whole_characters_are_decoded_once(kind: str) -> None:
    """2,000 of them cost no more decodes than it takes to learn the text of each, whichever answer they are in."""
    tokenizer = RecordingTokenizer(KINDS[kind]())
    ids = [token_id for token_id in range(0x100, tokenizer.vocab_size) if tokenizer.own_text(token_id) is not None]
    assert len(ids) >= 4
    tokenizer.decode_lengths.clear()
    for _ in range(2):
        assert "".join(detokenize(tokenizer, ids[:4] * 500)) == TOKENIZERS[kind].decode(ids[:4] * 500)
    assert len(tokenizer.decode_lengths) <= 4  # the first token of each answer


@pytest.mark.parametrize("kind", ["word suffix", "python"])
def test_no_text_is_taken_for_a_tokens_own_where_neighbours_may_change_it(kind: str) -> None:
    """Such decoders are asked about each token where it stands."""
    tokenizer = TOKENIZERS[kind]
    assert {tokenizer.own_text(token_id) for token_id in range(tokenizer.vocab_size)} == {None}


def test_tokens_across_characters_for_ever_are_decoded_right() -> None:
    """Each of 1,000 tokens ends one character and begins the next, so that no token boundary is safe to cut at."""
    tokenizer = TOKENIZERS["byte level"]
    straddling = next(
        token_id
        for token_id in range(tokenizer.vocab_size)
        if tokenizer.decode([0xF0, token_id, 0x9F, 0x98, 0x80]) == "\ufffd😀"
    )
    ids = [0xF0, *[straddling] * 1000, 0x9F, 0x98, 0x80]
    assert "".join(detokenize(tokenizer, ids)) == tokenizer.decode(ids)


def _with_start_token() -> PreTrainedTokenizerFast:
    backend = Backend(models.WordLevel(vocab=_numbered(["<unk>", "hi", "<s>", "</s>"]), unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 2)])
    backend.add_special_tokens(["<s>", "</s>"])
    return _for_transformers(backend)


def test_prompt_gets_the_tokenizers_start_token() -> None:
    """A plain prompt is encoded as the model expects it."""
    assert Tokenizer(_with_start_token()).encode("hi hi") == [2, 1, 1]


@pytest.mark.parametrize(("text", "ids"), [("<s>hi", [2, 1]), ("<s><s>hi", [2, 2, 1]), ("<s>", [2]), ("", [2])])
def test_start_token_in_the_text_is_not_doubled(text: str, ids: list[int]) -> None:
    """A start token that is spelled out counts; none is put in front of it."""
    assert Tokenizer(_with_start_token()).encode(text) == ids


def test_tokenizer_that_adds_nothing_keeps_the_text_as_it_is() -> None:
    """Two start tokens that the caller wrote are the caller's."""
    tokenizer = TOKENIZERS["word level"]
    start_id = tokenizer.encode("<s>")[0]
    assert tokenizer.encode("<s><s>") == [start_id, start_id]


def test_text_that_is_no_unicode_is_refused() -> None:
    """An unpaired surrogate is the caller's mistake."""
    with pytest.raises(InvalidRequest) as refusal:
        TOKENIZERS["byte level"].encode("a\ud800")
    assert refusal.value.parameter == "prompt"


TEMPLATE = (
    "<s>{% for message in messages %}{% if message.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    " {{ message.content }}{% endfor %}{% if add_generation_prompt %} hi{% endif %}"
)


def _chat_tokenizer(template: str | None) -> Tokenizer:
    tokenizer = _with_start_token()
    tokenizer.chat_template = template
    return Tokenizer(tokenizer)


def test_conversation_goes_through_the_models_template() -> None:
    """The template's start token is the only one, and the answer is asked for."""
    assert _chat_tokenizer(TEMPLATE).encode_chat([("user", "hi"), ("assistant", "hi"), ("user", "hi")]) == [
        2,
        1,
        1,
        1,
        1,
    ]


@pytest.mark.parametrize(
    ("template", "messages", "words"),
    [
        (None, [("user", "hi")], "--raw"),
        (TEMPLATE, [], "at least one message"),
        (TEMPLATE, [("tool", "hi")], "'tool'"),
        (TEMPLATE, [("system", "hi")], "no system role"),
        (TEMPLATE, [("user", "\ud800")], "refuses"),
        ("{{ 1 + 'a' }}", [("user", "hi")], "refuses"),
        ("{{ messages[7].content }}", [("user", "hi")], "refuses"),
        ("{{ 1 / 0 }}", [("user", "hi")], "refuses"),
        ("{% for", [("user", "hi")], "refuses"),
    ],
)
def test_conversation_that_cannot_be_encoded_is_refused(
    template: str | None, messages: list[tuple[str, str]], words: str
) -> None:
    """Whatever is wrong, the error names the parameter and says what."""
    with pytest.raises(InvalidRequest, match=words) as refusal:
        _chat_tokenizer(template).encode_chat(messages)
    assert refusal.value.parameter == "messages"


@pytest.mark.parametrize(
    "tokenizer_json", [None, "{bad", "[]", '{"version": "1.0", "added_tokens": [], "model": {"type": "none"}}']
)
def test_tokenizer_that_cannot_be_loaded_is_a_typed_error(tmp_path: Path, tokenizer_json: str | None) -> None:
    """A missing or damaged tokenizer ends in one sentence, whatever the libraries raise."""
    if tokenizer_json is not None:
        (tmp_path / "tokenizer.json").write_text(tokenizer_json)
        (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(ModelUnavailable, match="cannot be loaded") as failure:
        Tokenizer.load(str(tmp_path))
    assert "\n" not in str(failure.value)


def test_saved_tokenizer_loads_from_its_folder(tmp_path: Path) -> None:
    """A local folder is as good as a name."""
    _with_start_token().save_pretrained(tmp_path)
    tokenizer = Tokenizer.load(str(tmp_path))
    assert tokenizer.encode("hi") == [2, 1]
    assert (tokenizer.eos_token_id, tokenizer.vocab_size) == (3, 4)
    assert tokenizer.fingerprint == tokenizer_fingerprint(_with_start_token())


# ---------------------------------------------------------------------------------------------------------------------
# Tokens by themselves


@pytest.mark.parametrize("build", [byte_level_tokenizer, sentencepiece_tokenizer, metaspace_tokenizer])
def test_bytes_of_single_tokens_join_to_the_text(build: Callable[[], PreTrainedTokenizerBase]) -> None:
    """Whatever characters the tokens cut through; SentencePiece drops the space at the very beginning."""
    tokenizer = Tokenizer(build())
    ids = tokenizer.encode(TRICKY_TEXT)
    joined = b"".join(tokenizer.spell(token_id).utf8 for token_id in ids).decode()
    assert joined.removeprefix(" ") == tokenizer.decode(ids).removeprefix(" ")


@pytest.mark.parametrize("build", [byte_level_tokenizer, sentencepiece_tokenizer, metaspace_tokenizer])
def test_every_token_has_a_spelling_of_its_own_that_is_text(build: Callable[[], PreTrainedTokenizerBase]) -> None:
    """Bytes that are no characters are written out, special tokens have their name and add nothing, unknown ids a number."""
    tokenizer = Tokenizer(build())
    for token_id in range(tokenizer.vocab_size):
        spelled = tokenizer.spell(token_id)
        assert spelled.text.encode() == spelled.utf8 or spelled.text.startswith(("bytes:\\x", "<"))
    for name in SPECIAL_TOKENS:
        (token_id,) = tokenizer.encode(name)[-1:]
        assert (tokenizer.spell(token_id).text, tokenizer.spell(token_id).utf8) == (name, b"")
    assert tokenizer.spell(10**6).text == "<1000000>"


def test_half_a_character_is_written_in_bytes() -> None:
    """Unlike replacement marks, the spellings of different tokens differ."""
    tokenizer = Tokenizer(byte_level_tokenizer())
    spelled = {tokenizer.spell(token_id).text for token_id in range(tokenizer.vocab_size)}
    assert len(spelled) == tokenizer.vocab_size
    assert "bytes:\\xf0\\x9f" in spelled
