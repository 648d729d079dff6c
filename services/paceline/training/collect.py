"""The data stage: wave after wave of prompts, each answered by the target, until there are as many answers as wanted.

A wave is a function of the settings, its number and the waves before it, and is written whole. So a run that goes on
after an interruption makes the same waves. Knows nothing of drafters, or of where progress is shown.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Generic

import torch

from paceline.engine.interface import CacheT, Model
from paceline.errors import StartupFailed
from paceline.training.answers import Answer, Request, answer
from paceline.training.corpus import Corpus, Sample
from paceline.training.prompt_file import Prompt
from paceline.training.prompts import ChatFormat, TextEncoder, openings, text_tasks
from paceline.training.settings import TrainingSettings
from paceline.types import SamplingParams

PROMPT_TOKENS = 500  # the last ones of a longer prompt: what an answer begins with depends most on those
TURN_TOKENS = 48  # of what the target writes in the user's place
_TURN_SAMPLING = SamplingParams(temperature=1.0, top_p=0.9)
_TASK_SHARE = 5  # one turn in so many asks about an earlier answer
_TASK_WAVES, _TASK_TEXTS = 3, 200  # how many waves back those answers come from, and how many of each wave
_TEXT_CHARACTERS = 150  # shorter answers are not worth a summary
_ENTRIES = 64  # most probable tokens that are kept of a row
# Draws that must not meet: those of user turns, and of answers.
_TURN_SEEDS, _ANSWER_SEEDS, _SEEDS_OF_A_RUN = 0, 2**32, 2**33

OnAnswer = Callable[[int], None]
"""Hears of each answer, and how many tokens it has."""


def _ignore(tokens: int) -> None:
    return None


class Collector(Generic[CacheT]):
    """Makes waves of answers with one model; `prompts` is None where the model writes its own."""

    def __init__(
        self,
        model: Model[CacheT],
        tokenizer: TextEncoder,
        settings: TrainingSettings,
        *,
        stop_ids: Sequence[int],
        prompts: Sequence[Prompt] | None = None,
    ) -> None:
        """Raises `StartupFailed` if the model's context or its lack of a chat template does not allow what is asked."""
        self._model, self._tokenizer, self._settings = model, tokenizer, settings
        self._format = ChatFormat.of(tokenizer)
        self._stop_ids, self._prompts = frozenset(stop_ids), prompts
        self._prompt_tokens = min(PROMPT_TOKENS, model.max_context - settings.answer_tokens)
        if self._prompt_tokens < 1:
            raise StartupFailed(
                f"--answer-tokens {settings.answer_tokens} leave no room for a prompt in the {model.max_context} tokens "
                "that the target can read; lower them."
            )
        if prompts and not tokenizer.chat_template and any(not isinstance(prompt, str) for prompt in prompts):
            raise StartupFailed("The target has no chat template; give --prompts without conversations.")

    def collect(self, corpus: Corpus, *, on_answer: OnAnswer = _ignore) -> None:
        """Add to the corpus what it lacks. Raises `StartupFailed` where files cannot be read or written."""
        for wave in range(corpus.waves, self._settings.waves):
            corpus.write(wave, self._wave(wave, corpus, on_answer))

    def _wave(self, wave: int, corpus: Corpus, on_answer: OnAnswer) -> list[Sample]:
        settings, first = self._settings, wave * self._settings.wave_answers
        count = min(settings.wave_answers, settings.answers - first)
        prompts = self._spelt(first, count) if self._prompts else self._invented(wave, count, corpus)
        dice = random.Random(f"temperatures {settings.seed} {wave}")
        temperatures, shares = zip(*settings.temperatures, strict=True)
        requests = [
            Request(
                prompt_ids=self._encoded(prompt),
                sampling=SamplingParams(temperature=temperature),
                seed=self._seed(_ANSWER_SEEDS + first + number),
                max_tokens=settings.answer_tokens,
                stop_ids=self._stop_ids,
            )
            for number, (prompt, temperature) in enumerate(
                zip(prompts, dice.choices(temperatures, shares, k=count), strict=True)
            )
        ]
        answers = self._answered(requests, entries=_ENTRIES, on_answer=on_answer)
        return [_sample(request, each) for request, each in zip(requests, answers, strict=True)]

    def _spelt(self, first: int, count: int) -> list[str]:
        """Prompts of the file, as the model reads them."""
        assert self._prompts is not None
        spelt = []
        for prompt in self._prompts[first : first + count]:
            if isinstance(prompt, str):
                spelt.append(self._format.prompt(prompt))
            else:
                conversation = [{"role": role, "content": content} for role, content in prompt]
                spelt.append(
                    self._tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
                )
        return spelt

    def _invented(self, wave: int, count: int, corpus: Corpus) -> list[str]:
        """Prompts that the model wrote in the user's place, and tasks about its earlier answers, in any order."""
        seed = self._seed(wave)
        tasks = text_tasks(self._earlier_texts(wave, corpus), count // _TASK_SHARE, seed)
        beginnings = openings(count - len(tasks), seed)
        requests = [
            Request(
                prompt_ids=self._encoded(self._format.before_turn + beginning),
                sampling=_TURN_SAMPLING,
                seed=self._seed(_TURN_SEEDS + wave * self._settings.wave_answers + number),
                max_tokens=TURN_TOKENS,
                stop_ids=self._stop_ids,
            )
            for number, beginning in enumerate(beginnings)
        ]
        turns = [
            beginning + self._decoded(each.ids)
            for beginning, each in zip(beginnings, self._answered(requests, entries=1), strict=True)
        ]
        prompts = [self._format.prompt(turn) for turn in turns + tasks]
        random.Random(seed).shuffle(prompts)
        return prompts

    def _earlier_texts(self, wave: int, corpus: Corpus) -> list[str]:
        """Answers to set tasks about. Those that are held out are none: they must not come back as prompts."""
        texts = []
        for earlier in range(max(0, wave - _TASK_WAVES), wave):
            held_out = self._settings.held_out_answers - earlier * self._settings.wave_answers
            usable = corpus.read(earlier)[max(0, held_out) :]
            texts += [self._decoded(sample.answer_ids.tolist()) for sample in usable[:_TASK_TEXTS]]
        return [text for text in texts if len(text) > _TEXT_CHARACTERS]

    def _answered(self, requests: Sequence[Request], *, entries: int, on_answer: OnAnswer = _ignore) -> list[Answer]:
        answers: dict[int, Answer] = {}
        for index, each in answer(self._model, requests, max_sessions=self._settings.sessions, entries=entries):
            answers[index] = each
            on_answer(len(each.ids))
        return [answers[index] for index in range(len(requests))]

    def _encoded(self, text: str) -> tuple[int, ...]:
        """The last tokens of a prompt; the one that stands for nothing where there are none."""
        tokenizer = self._tokenizer
        # A chat template spells out the special tokens that a prompt begins with.
        ids = tokenizer.encode(text, add_special_tokens=not tokenizer.chat_template)
        nothing = next((each for each in (tokenizer.bos_token_id, tokenizer.eos_token_id) if each is not None), 0)
        return tuple(ids[-self._prompt_tokens :]) or (nothing,)

    def _decoded(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def _seed(self, number: int) -> int:
        return self._settings.seed * _SEEDS_OF_A_RUN + number


def _sample(request: Request, given: Answer) -> Sample:
    return Sample(
        torch.tensor(request.prompt_ids, dtype=torch.int32),
        torch.tensor(given.ids, dtype=torch.int32),
        given.rows.top_ids,
        given.rows.top_log_probs,
        request.sampling.temperature,
    )
