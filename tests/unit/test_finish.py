"""Where an answer ends: one boundary for text, ids and counts, whatever the rounds looked like."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, compress, pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.finish import Delivered, EndConditions, OutputTracker
from orchestrator.text import REPLACEMENT_MARK, IncrementalDetokenizer, Tokenizer
from paceline.errors import InvalidRequest
from paceline.types import FinishReason
from tests.unit.test_text import TRICKY_TEXT, byte_level_tokenizer, sentencepiece_tokenizer

STOP = 9
"""The stop token of the tests that look at ids alone."""


class LetterDetokenizer:
    """Token 0 is "a", token 1 is "b", and so on."""

    pending = ""

    def push(self, token_id: int) -> str:
        return chr(ord("a") + token_id)

    def flush(self) -> str:
        return ""


class WordDetokenizer(LetterDetokenizer):
    """Each token is one of the given words."""

    def __init__(self, *words: str) -> None:
        self._words = words

    def push(self, token_id: int) -> str:
        return self._words[token_id]


class LateDetokenizer(WordDetokenizer):
    """Gives out nothing before the flush, and lets nothing be known before."""

    def __init__(self, *words: str) -> None:
        super().__init__(*words)
        self._text = ""

    def push(self, token_id: int) -> str:
        self._text += super().push(token_id)
        return ""

    def flush(self) -> str:
        return self._text


@dataclass(frozen=True)
class Answer:
    """All that a client saw."""

    text: str
    token_ids: tuple[int, ...]
    output_length: int
    finish_reason: FinishReason | None


def track(tracker: OutputTracker, runs: Sequence[Sequence[int]]) -> Answer:
    """Give the runs to the tracker until the answer ends, as the rounds would."""
    delivered: list[Delivered] = []
    for run in runs:
        delivered.append(tracker.accept(run))
        if tracker.finish_reason is not None:
            break
    text = "".join(part.text for part in delivered) + tracker.finish()
    token_ids = tuple(token_id for part in delivered for token_id in part.token_ids)
    return Answer(text, token_ids, tracker.output_length, tracker.finish_reason)


def letters(*, max_tokens: int = 100, min_tokens: int = 0, stop: tuple[str, ...] = ()) -> OutputTracker:
    ends = EndConditions(max_tokens=max_tokens, min_tokens=min_tokens, stop=stop, stop_token_ids=frozenset({STOP}))
    return OutputTracker(LetterDetokenizer(), ends)


def words(*words: str, stop: tuple[str, ...], max_tokens: int = 100, min_tokens: int = 0) -> OutputTracker:
    return OutputTracker(
        WordDetokenizer(*words), EndConditions(max_tokens=max_tokens, min_tokens=min_tokens, stop=stop)
    )


@pytest.mark.parametrize("position", range(5))
def test_end_token_ends_the_answer_wherever_it_stands_in_a_round(position: int) -> None:
    """Field case C23: four kept tokens and the bonus, the end token at any of the five."""
    round_ids = [1, 2, 3, 4, 5]
    round_ids[position] = STOP
    answer = track(letters(), [round_ids])
    assert (len(answer.token_ids), answer.finish_reason) == (position + 1, FinishReason.STOP)


@pytest.mark.parametrize(
    ("round_ids", "length", "reason"),
    [
        ([1, 2, STOP, 3, 4, 5], 3, FinishReason.STOP),
        ([1, 2, 3, 4, STOP], 5, FinishReason.STOP),
        ([1, 2, 3, 4, 5, 6, STOP], 5, FinishReason.LENGTH),
    ],
)
def test_stop_is_looked_at_before_the_length(round_ids: list[int], length: int, reason: FinishReason) -> None:
    """Field case C24: with a limit of 5, the first that happens wins, and the stop wins a tie."""
    answer = track(letters(max_tokens=5), [round_ids])
    assert answer.token_ids == tuple(round_ids[:length])
    assert (answer.output_length, answer.finish_reason) == (length, reason)


def test_stop_string_early_in_a_long_round_is_found() -> None:
    """Field case C25: twelve tokens at once, the second completes the stop string."""
    tracker = words("so E", "ND", "x", stop=("END",))
    answer = track(tracker, [[0, 1, *[2] * 10]])
    assert answer == Answer("so ", (0, 1), 2, FinishReason.STOP)


def _ways_to_fill(length: int, longest: int) -> Iterator[list[int]]:
    """All sequences of round lengths from 1 to `longest` that reach `length`, and do not before their last round."""
    for first in range(1, longest + 1):
        if first >= length:
            yield [first]
        else:
            yield from ([first, *rest] for rest in _ways_to_fill(length - first, longest))


def test_usage_is_what_was_delivered_for_every_pattern_of_kept_lengths() -> None:
    """Field case C26: max_tokens 8, draft_length 4, so rounds of 1 to 5 tokens; all 497 patterns."""
    patterns = list(_ways_to_fill(8, 5))
    for pattern in patterns:
        answer = track(letters(max_tokens=8), [[1] * length for length in pattern])
        assert answer == Answer("b" * 8, (1,) * 8, 8, FinishReason.LENGTH)
    assert len(patterns) == 497


def test_perfect_lookup_does_not_overshoot() -> None:
    """Field case C27: max_tokens 2, three drafted tokens and the bonus, all right."""
    assert track(letters(max_tokens=2), [[1, 2, 3, 4]]) == Answer("bc", (1, 2), 2, FinishReason.LENGTH)


def test_nothing_behind_the_stop_is_delivered() -> None:
    """Field cases C16 and C29: the stop in mid-round is where the answer stands, as if the round had ended there."""
    tracker, shorter = letters(), letters()
    assert tracker.accept([1, 2, STOP, 3, 4, 5]) == shorter.accept([1, 2, STOP])
    assert (tracker.output_length, tracker.remaining) == (shorter.output_length, shorter.remaining) == (3, 97)
    assert tracker.accept([6]) == Delivered((), (), FinishReason.STOP)
    assert tracker.output_length == 3


def test_stop_token_shows_no_text() -> None:
    """It is part of the ids and of the usage, not of the text, even if it could be written."""
    delivered = letters().accept([1, STOP])
    assert (delivered.text, delivered.pieces, delivered.token_ids) == ("b", ("b", ""), (1, STOP))


@pytest.mark.parametrize(
    ("vocabulary", "round_ids", "stop", "text", "length"),
    [
        (("xE", "N", "D", "y"), [0, 1, 2, 3], ("END",), "x", 3),  # over three tokens
        (("aENDb", "y"), [0, 1], ("END",), "a", 1),  # inside one token
        (("E", "EN", "D!"), [0, 1, 2], ("END",), "E", 3),  # the first beginning is none
        (("abcd",), [0], ("cd", "bc"), "a", 1),  # the one that begins first wins
        (("abcd",), [0], ("d", "abcd"), "", 1),
        (("ab", "c", "d"), [0, 1, 2], ("abcd", "bc"), "a", 2),  # the one that is complete first wins
        (("aa", "ab"), [0, 1], ("aab",), "a", 2),  # begins inside the run of a's
        (("aa", "bc"), [0, 1], ("abc",), "a", 2),  # only the second of two a's begins it
        (("xE", "ND"), [0, 1], ("no", "END", "so"), "x", 2),  # one of several
        (("END",), [0], ("END",), "", 1),  # nothing else
    ],
)
def test_stop_string_cuts_the_text_before_it_and_keeps_the_token_that_completes_it(
    vocabulary: tuple[str, ...], round_ids: list[int], stop: tuple[str, ...], text: str, length: int
) -> None:
    """However the stop string lies over tokens, and whatever other stop strings it overlaps."""
    answer = track(words(*vocabulary, stop=stop), [round_ids])
    assert answer == Answer(text, tuple(round_ids[:length]), length, FinishReason.STOP)


def test_beginning_of_a_stop_string_is_held_back_until_it_is_none() -> None:
    """What might be cut is not sent, and all of it is sent when it cannot be cut any more."""
    tracker = words("so E", "N", "X", stop=("END",))
    assert [tracker.accept([token_id]).text for token_id in (0, 1, 2)] == ["so ", "", "ENX"]


@pytest.mark.parametrize("last_id", [0, STOP])
def test_text_held_back_is_delivered_at_the_end(last_id: int) -> None:
    """An answer that ends by length or stop token ends with what looked like a stop string, once."""
    ends = EndConditions(max_tokens=2, stop=("END",), stop_token_ids=frozenset({STOP}))
    tracker = OutputTracker(WordDetokenizer("EN"), ends)
    delivered = tracker.accept([0, last_id])
    assert delivered.text == ("EN" if last_id == 0 else "")
    assert [tracker.finish(), tracker.finish()] == ["EN", ""]


def test_stop_string_completed_by_the_last_held_text_is_a_stop() -> None:
    """Text that becomes known only at the end is searched before the reason is given."""
    tracker = OutputTracker(LateDetokenizer("xEN", "D"), EndConditions(max_tokens=2, stop=("END",)))
    assert track(tracker, [[0, 1]]) == Answer("x", (0, 1), 2, FinishReason.STOP)


def test_finish_ends_an_answer_that_nothing_else_has_ended() -> None:
    """The caller may run out of context before anything here ends the answer."""
    tracker = words("xEN", stop=("END",))
    assert tracker.accept([0]).text == "x"
    assert tracker.finish() == "EN"
    assert tracker.finish_reason is FinishReason.LENGTH


def test_min_tokens_come_before_the_token_that_ends_the_answer() -> None:
    """A stop token or stop string among the first `min_tokens` tokens is ordinary text; the next one ends."""
    assert track(letters(min_tokens=2), [[STOP, STOP, STOP, 1]]).token_ids == (STOP, STOP, STOP)
    answer = track(words("END", stop=("END",), min_tokens=2), [[0, 0, 0, 0]])
    assert answer == Answer("ENDEND", (0, 0, 0), 3, FinishReason.STOP)


def test_exempt_stop_string_is_ordinary_text() -> None:
    """Nothing of it is held back."""
    assert words("END", stop=("END",), min_tokens=1).accept([0]).text == "END"


@pytest.mark.parametrize("text_before", ["", "x"])
def test_stop_string_that_was_exempt_is_not_found_again(text_before: str) -> None:
    """The text of an exempt stop string may still be held back, as the beginning of another; it stays exempt."""
    tracker = words("ab", "y", text_before, stop=("ab", "abab"), min_tokens=2)
    assert track(tracker, [[2, 0, 1, 0]]) == Answer(f"{text_before}aby", (2, 0, 1, 0), 4, FinishReason.STOP)


def test_stop_string_may_begin_within_min_tokens() -> None:
    """What counts is the token that completes it."""
    assert track(words("a", stop=("aa",), min_tokens=1), [[0, 0, 0]]) == Answer("", (0, 0), 2, FinishReason.STOP)


def test_length_ends_an_answer_within_min_tokens() -> None:
    """`max_tokens` holds in any case."""
    assert track(words("END", stop=("END",), max_tokens=1, min_tokens=1), [[0, 0]]).finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("draft_length", range(8))
@pytest.mark.parametrize("text", ["👩‍👩‍👧", "你好 world", "é नि ₿", TRICKY_TEXT])
def test_characters_are_never_split_between_rounds(text: str, draft_length: int) -> None:
    """Field case C51: one byte a token, in rounds of 1 to 8 tokens; no piece but the last ends in a mark."""
    ids = list(text.encode())
    tracker = OutputTracker(IncrementalDetokenizer(BYTE_LEVEL), EndConditions(max_tokens=len(ids) + 1))
    rounds = [ids[start : start + draft_length + 1] for start in range(0, len(ids), draft_length + 1)]
    pieces = [tracker.accept(round_ids).text for round_ids in rounds]
    assert "".join(pieces) + tracker.finish() == text
    assert not any(piece.endswith(REPLACEMENT_MARK) for piece in pieces)


@pytest.mark.parametrize("text", ["🇩🇪", "👍🏽", "e\u0301o\u0323", "한국!", "क्षि", "שלום", "你好a"])
def test_every_split_of_hard_text_gives_the_same_pieces(text: str) -> None:
    """One byte a token in each of the 32 to 2,048 ways to split them, without a stop string, with one that straddles
    characters, and with one that is never complete."""
    ids = list(text.encode())
    for stop in ((), (text[-2:],), (f"{text[-2:]}?",)):
        ends = EndConditions(max_tokens=len(ids) + 1, stop=stop)
        whole = OutputTracker(IncrementalDetokenizer(BYTE_LEVEL), ends)
        pieces, rest = whole.accept(ids).pieces, whole.finish()
        assert "".join(pieces) + rest == (text[:-2] if text[-2:] in stop else text)
        for is_cut in product((False, True), repeat=len(ids) - 1):
            tracker = OutputTracker(IncrementalDetokenizer(BYTE_LEVEL), ends)
            starts = [0, *compress(range(1, len(ids)), is_cut), len(ids)]
            cut = [tracker.accept(ids[start:end]).pieces for start, end in pairwise(starts)]
            assert (tuple(chain.from_iterable(cut)), tracker.finish()) == (pieces, rest)


@pytest.mark.parametrize(
    ("parameter", "build"),
    [
        ("max_tokens", lambda: EndConditions(max_tokens=0)),
        ("min_tokens", lambda: EndConditions(max_tokens=8, min_tokens=-1)),
        ("min_tokens", lambda: EndConditions(max_tokens=3, min_tokens=4)),
        ("stop", lambda: EndConditions(max_tokens=8, stop=("x",) * 17)),
        ("stop", lambda: EndConditions(max_tokens=8, stop=("x", ""))),
        ("stop", lambda: EndConditions(max_tokens=8, stop=("x" * 257,))),
    ],
)
def test_conditions_out_of_range_are_refused_by_name(parameter: str, build: Callable[[], EndConditions]) -> None:
    """The error says which parameter to change."""
    with pytest.raises(InvalidRequest, match=parameter) as refusal:
        build()
    assert refusal.value.parameter == parameter


BYTE_LEVEL = Tokenizer(byte_level_tokenizer())
SENTENCEPIECE = Tokenizer(sentencepiece_tokenizer())


def expected_answer(tokenizer: Tokenizer, ids: Sequence[int], ends: EndConditions) -> Answer:
    """The definition: decode everything again behind each token, and look for what ends the answer there."""
    exempt_length = 0
    for length, token_id in enumerate(ids, start=1):
        if length > ends.min_tokens and token_id in ends.stop_token_ids:
            return Answer(tokenizer.decode(ids[: length - 1]), tuple(ids[:length]), length, FinishReason.STOP)
        text = tokenizer.decode(ids[:length]).rstrip(REPLACEMENT_MARK)  # without an unfinished character
        if length <= ends.min_tokens:
            exempt_length = len(text)
        starts = [
            start
            for stop in ends.stop
            for start in range(len(text))
            if text.startswith(stop, start) and start + len(stop) > exempt_length
        ]
        if starts:
            return Answer(text[: min(starts)], tuple(ids[:length]), length, FinishReason.STOP)
        if length == ends.max_tokens:
            break
    delivered = tuple(ids[: ends.max_tokens])
    return Answer(tokenizer.decode(delivered), delivered, len(delivered), FinishReason.LENGTH)


def drawn_answer(tokenizer: Tokenizer, data: st.DataObject) -> tuple[list[int], EndConditions]:
    """Tokens with single bytes, special and unknown ids among them, and conditions that may end them anywhere."""
    usual = st.sampled_from([*b"aaabbb\n\xf0\x9f\x98\x80", tokenizer.vocab_size - 2])
    ids = data.draw(st.lists(usual | st.integers(0, tokenizer.vocab_size), min_size=1, max_size=24))
    ends = EndConditions(
        max_tokens=data.draw(st.integers(10, 30)),
        min_tokens=data.draw(st.integers(0, 4)),
        stop=tuple(data.draw(st.lists(st.text("ab\n😀", min_size=1, max_size=4), max_size=3))),
        stop_token_ids=frozenset(data.draw(st.lists(st.sampled_from(ids), max_size=1))),
    )
    return ids, ends


def drawn_rounds(ids: Sequence[int], data: st.DataObject) -> list[Sequence[int]]:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(ids)))) | {0, len(ids)})
    return [ids[start:end] for start, end in pairwise(cuts)]


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte level", "sentencepiece"])
@settings(max_examples=500, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_split_into_rounds_gives_the_answer_of_the_definition(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """500 drawn answers a tokenizer, with stop strings, stop tokens and limits: exact, so no failure is by chance."""
    ids, ends = drawn_answer(tokenizer, data)
    tracker = OutputTracker(IncrementalDetokenizer(tokenizer), ends)
    assert track(tracker, drawn_rounds(ids, data)) == expected_answer(tokenizer, ids, ends)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte level", "sentencepiece"])
@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
def test_text_given_out_with_each_token_depends_on_the_tokens_alone(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """150 drawn answers a tokenizer, in rounds and all at once: the same piece for every token, and the same rest."""
    ids, ends = drawn_answer(tokenizer, data)
    at_once, in_rounds = (OutputTracker(IncrementalDetokenizer(tokenizer), ends) for _ in range(2))
    expected = at_once.accept(ids)
    pieces = [piece for round_ids in drawn_rounds(ids, data) for piece in in_rounds.accept(round_ids).pieces]
    assert (tuple(pieces), in_rounds.finish()) == (expected.pieces, at_once.finish())


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte level", "sentencepiece"])
@settings(max_examples=100, deadline=None, derandomize=True)
@given(data=st.data())
def test_tracker_that_has_seen_the_tokens_again_goes_on_where_it_was(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """100 drawn answers a tokenizer, each interrupted behind every token: nothing is given out twice, nothing is lost."""
    ids, ends = drawn_answer(tokenizer, data)
    undisturbed = OutputTracker(IncrementalDetokenizer(tokenizer), ends)
    whole, rest = undisturbed.accept(ids), undisturbed.finish()
    for cut in range(len(whole.token_ids) + 1):
        resumed = OutputTracker(IncrementalDetokenizer(tokenizer), ends)
        resumed.accept(ids[:cut])
        following = resumed.accept(ids[cut:])
        assert (following.token_ids, following.pieces) == (whole.token_ids[cut:], whole.pieces[cut:])
        assert (resumed.finish(), resumed.finish_reason) == (rest, undisturbed.finish_reason)
        assert resumed.output_length == undisturbed.output_length
