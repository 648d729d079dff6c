"""From settings to a drafter's folder, in three stages: the target's answers, the training, the evaluation.

All that a run has done is in its folder, and the same settings on the same folder go on from there. Knows nothing of
terminals and signals; whoever runs it hears of progress, and may ask it to stop.
"""

from __future__ import annotations

import gc
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from filelock import FileLock, Timeout

from paceline import sampling
from paceline.engine.checkpoint import load_network, load_tokenizer, resolve_checkpoint
from paceline.engine.memory import MemoryLimits
from paceline.engine.model import CausalModel
from paceline.engine.shallow import decoder_layers
from paceline.errors import StartupFailed
from paceline.training.card import Made, model_card
from paceline.training.collect import PROMPT_TOKENS, TURN_TOKENS, Collector
from paceline.training.corpus import Corpus, Sample, coverage, frequent_ids
from paceline.training.costs import step_costs
from paceline.training.evaluation import Evaluation, evaluate
from paceline.training.folder import write_drafter
from paceline.training.log import TrainingLog
from paceline.training.prompt_file import Prompt
from paceline.training.prompts import TextEncoder
from paceline.training.settings import TrainingSettings, remember
from paceline.training.student import Shape, Student
from paceline.training.trainer import Recipe, StepLog, Trainer
from paceline.training.writing import write_whole

CHECKPOINT_INTERVAL_S = 60.0
_LOG_STEPS = 100  # between two lines of the log; fewer in a short run
_LOOKS = 10  # at the held-out answers during the training
_ASSUMED_STEP_COST = 0.1  # until it is measured, for which there must be a drafter
_WARMUP_SHARE, _WARMUP_STEPS = 10, 100  # a tenth of the steps, and no more than so many


class Observer(Protocol):
    """Whoever is told how far a run is."""

    def on_answer(self, tokens: int) -> None:
        """Another answer, of so many tokens."""

    def on_step(self, loss: float) -> None:
        """Another step."""

    def on_log(self, log: StepLog, evaluation: Evaluation | None) -> None:
        """What came of the last steps, and now and then of a look at the held-out answers."""

    def is_asked_to_stop(self) -> bool:
        """Whether to stop behind this step."""


@contextmanager
def opened(folder: Path, settings: TrainingSettings) -> Iterator[None]:
    """The folder of a run, for this process alone.

    Raises `StartupFailed` if another process has it, if it was begun with other settings, or if it cannot be written.
    """
    lock = FileLock(folder / ".lock", timeout=0)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout as error:
        raise StartupFailed(
            f"Another run is at work in '{folder}'; wait for it, or choose another --output."
        ) from error
    except OSError as error:
        raise StartupFailed(f"Cannot write into '{folder}' ({error}); choose another --output.") from error
    try:
        remember(folder, settings)
        yield
    finally:
        lock.release()


def use_threads(threads: int) -> None:
    """So many for arithmetic, from now on."""
    torch.set_num_threads(threads)


def answers_made(folder: Path, settings: TrainingSettings) -> int:
    """How many answers there are already."""
    return min(settings.answers, _corpus(folder).waves * settings.wave_answers)


def _corpus(folder: Path) -> Corpus:
    return Corpus(folder / "answers")


def make_answers(
    folder: Path,
    settings: TrainingSettings,
    observer: Observer,
    *,
    prompts: Sequence[Prompt] | None = None,
    cache_dir: Path | None = None,
) -> None:
    """The first stage: have the target answer until there are as many answers as wanted."""
    corpus = _corpus(folder)
    if corpus.waves >= settings.waves:
        return
    # "auto" is measured, and could come out otherwise for the rest of the answers.
    format_path = folder / "answers" / "dtype"
    dtype = format_path.read_text(encoding="utf-8") if format_path.exists() else settings.dtype
    model = _load_model(settings.target, settings, dtype=dtype, sessions=settings.sessions, cache_dir=cache_dir)
    write_whole(format_path, lambda partial: partial.write_text(_name(model.dtype), encoding="utf-8"))
    # The methods of transformers' tokenizers return many types, these arguments one.
    tokenizer = cast("TextEncoder", load_tokenizer(resolve_checkpoint(settings.target, cache_dir=cache_dir)))
    collector = Collector(model, tokenizer, settings, stop_ids=model.eos_token_ids, prompts=prompts)
    collector.collect(corpus, on_answer=observer.on_answer)


def _load_model(
    name: str, settings: TrainingSettings, *, dtype: str, sessions: int, cache_dir: Path | None
) -> CausalModel:
    """A model with memory for so many of the longest sessions there are here."""
    longest = PROMPT_TOKENS + max(TURN_TOKENS, settings.answer_tokens)
    model = CausalModel.load(
        name,
        dtype=dtype,
        device=settings.device,
        cache_dir=cache_dir,
        limits=MemoryLimits(kv_budget_tokens=sessions * longest, max_sessions=sessions),
        shares_prefixes=False,
    )
    model.warm_up()
    sampling.warm_up()
    return model


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class Answers:
    """What a student learns from, and what it is judged on."""

    trained: Sequence[Sample]
    held_out: Sequence[Sample]  # none of whose prompts is trained on

    @classmethod
    def of(cls, folder: Path, settings: TrainingSettings) -> Answers:
        samples = list(_corpus(folder).samples(settings.waves))
        held_out, trained = samples[: settings.held_out_answers], samples[settings.held_out_answers :]
        seen = {tuple(sample.prompt_ids.tolist()) for sample in trained}
        return cls(trained, [sample for sample in held_out if tuple(sample.prompt_ids.tolist()) not in seen])


class Training:
    """The second and the third stage. Invariant: behind each step that the observer hears of, the run can go on from a
    checkpoint as if it had never been interrupted."""

    def __init__(self, folder: Path, settings: TrainingSettings, *, cache_dir: Path | None = None) -> None:
        """Load target and answers, and go on from the checkpoint if there is one."""
        self._folder, self._settings, self._cache_dir = folder, settings, cache_dir
        self.answers = Answers.of(folder, settings)
        checkpoint = resolve_checkpoint(settings.target, cache_dir=cache_dir)
        target = load_network(checkpoint, dtype=torch.float32)
        config = target.config.get_text_config(decoder=True)
        draft_vocab_size = settings.draft_vocab_size or config.vocab_size
        draft_ids = frequent_ids(self.answers.trained, config.vocab_size, draft_vocab_size)
        shape = Shape(
            settings.layers_of(len(decoder_layers(target))), settings.trained_layers, settings.draft_vocab_size
        )
        self.student = Student(target, shape, draft_ids)
        del target
        gc.collect()  # the layers that the student has no use for
        self._trainer = Trainer(self.student, self.answers.trained, _recipe(settings))
        self._checkpoint = folder / "checkpoint.pt"
        if self._checkpoint.exists():
            self._trainer.load(self._checkpoint)
        self._log = TrainingLog(folder / "training_log.jsonl")
        self._log.cut_back(self._trainer.step)

    @property
    def step(self) -> int:
        """How many steps are done."""
        return self._trainer.step

    @property
    def log(self) -> Sequence[dict[str, Any]]:
        return self._log.entries

    def run(self, observer: Observer) -> bool:
        """Train to the end, or until asked to stop; whether it came to the end. Both leave a checkpoint."""
        if self._trainer.step == 0 and not self.log:
            self._report(StepLog(0, math.nan, 0.0, 0, 0.0), observer, is_look=True)
        saved_s = time.monotonic()

        def on_step(loss: float) -> None:
            nonlocal saved_s
            observer.on_step(loss)
            if observer.is_asked_to_stop():
                raise _Stopped
            if time.monotonic() - saved_s > CHECKPOINT_INTERVAL_S:
                self._trainer.save(self._checkpoint)
                saved_s = time.monotonic()

        try:
            while not self._trainer.is_done:
                self._run_to_next_line(on_step, observer)
        except _Stopped:
            self._trainer.save(self._checkpoint)
            return False
        self._trainer.save(self._checkpoint)
        return True

    def _run_to_next_line(self, on_step: Callable[[float], None], observer: Observer) -> None:
        steps = self._settings.trained_steps
        line_steps = min(_LOG_STEPS, -(-steps // _LOOKS))
        look_steps = line_steps * -(-steps // (_LOOKS * line_steps))
        log = self._trainer.run(
            until=self._trainer.step + line_steps - self._trainer.step % line_steps, on_step=on_step
        )
        self._report(log, observer, is_look=log.step % look_steps == 0 or self._trainer.is_done)

    def _report(self, log: StepLog, observer: Observer, *, is_look: bool) -> None:
        evaluation = self._evaluate() if is_look else None
        entry = {name: value for name, value in asdict(log).items() if not math.isnan(value)}
        self._log.append(entry | ({"evaluation": evaluation.to_json()} if evaluation else {}))
        observer.on_log(log, evaluation)

    def finish(self, *, command: str) -> Evaluation:
        """The third stage: evaluate, and write the drafter, its evaluation and its model card, which names `command`."""
        evaluation = self._evaluate().with_costs(_ASSUMED_STEP_COST)
        write_drafter(self._folder, self.student, verifier=self._settings.target, evaluation=evaluation)
        evaluation = self._with_costs(evaluation)
        write_drafter(self._folder, self.student, verifier=self._settings.target, evaluation=evaluation)
        text = json.dumps(evaluation.to_json(), indent=2) + "\n"
        card = model_card(self._settings, self._made(command), evaluation)
        write_whole(self._folder / "evaluation.json", lambda partial: partial.write_text(text, encoding="utf-8"))
        write_whole(self._folder / "README.md", lambda partial: partial.write_text(card, encoding="utf-8"))
        return evaluation

    def _with_costs(self, evaluation: Evaluation) -> Evaluation:
        """The same with what a step of the drafter and of the target cost here, as they are served."""
        settings, cache_dir = self._settings, self._cache_dir
        target = _load_model(settings.target, settings, dtype=settings.dtype, sessions=1, cache_dir=cache_dir)
        dtype = _name(target.dtype)
        drafter = _load_model(str(self._folder), settings, dtype=dtype, sessions=1, cache_dir=cache_dir)
        return evaluation.with_costs(*step_costs(target, drafter))

    def _made(self, command: str) -> Made:
        trained = self.answers.trained
        return Made(
            command=command,
            layers=self.student.shape.layers,
            parameters=sum(parameter.numel() for parameter in self.student.parameters),
            draft_vocab_size=len(self.student.draft_ids),
            coverage=coverage(self.answers.held_out, self.student.draft_ids),
            trained_answers=len(trained),
            trained_tokens=sum(len(sample.answer_ids) for sample in trained),
            held_out_answers=len(self.answers.held_out),
            seconds=self._trainer.seconds,
        )

    def _evaluate(self) -> Evaluation:
        temperatures = [temperature for temperature, _ in self._settings.temperatures]
        return evaluate(self.student, self.answers.held_out, temperatures=temperatures)


class _Stopped(Exception):
    """Asked to stop behind a step."""


def _recipe(settings: TrainingSettings) -> Recipe:
    steps = settings.trained_steps
    return Recipe(
        steps=steps,
        batch_samples=settings.batch_samples,
        learning_rate=settings.learning_rate,
        warmup_steps=max(1, min(_WARMUP_STEPS, steps // _WARMUP_SHARE)),
        seed=settings.seed,
    )
