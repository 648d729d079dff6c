"""The command line against a fake server and stand-in services: output, order, refusals, exit statuses."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from paceline.cli.batch import Outcome, complete_all
from paceline.cli.comparison import PromptRuns, comparison_table, verdict_on_equality, verdict_on_speed
from paceline.cli.demo import PROMPTS, SCHEDULES, load_warning
from paceline.cli.up import readable
from paceline.client import (
    DEFAULT_TIMEOUT_S,
    Completion,
    FinishReason,
    GenerationClient,
    GenerationRequest,
    Origin,
    Schedule,
    SpeculationUsage,
    Usage,
)
from paceline.errors import ContextTooLong
from paceline.v1 import generation_service_pb2 as pb
from paceline.v1 import session_pb2 as session_pb
from tests.command_line import ESCAPE, end, paceline, refused, started, uncoloured
from tests.fake_generation import SEED, TEXT, FakeGenerationService, canned_answer, prompt_of, serving
from tests.fake_stack import FakeStack, install, is_alive, wait_until_gone
from tests.stand_in import HTTP_URL, Behaviour


@pytest.fixture
def service() -> FakeGenerationService:
    return FakeGenerationService()


@pytest.fixture
def endpoint(service: FakeGenerationService) -> Iterator[str]:
    with serving(service) as address:
        yield address


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeStack:
    fakes = install(tmp_path / "stand-ins", monkeypatch)
    fakes.behave("orchestrator", Behaviour(generates=True))
    return fakes


# ---------------------------------------------------------------------------------------------------------------------
# generate: one answer


def test_answer_goes_to_standard_output_alone(endpoint: str) -> None:
    """A pipe gets the text and a line end, without colours or numbers."""
    result = paceline("generate", "Why?", "--endpoint", endpoint)
    assert result.exit_code == 0
    assert result.stdout == TEXT + "\n"
    assert ESCAPE not in result.output


def test_table_shows_the_numbers_of_the_answer(endpoint: str) -> None:
    """Tokens, speed, acceptance, mean acceptance length, rounds and the target's share of time stand on standard error."""
    result = paceline("generate", "Why?", "--endpoint", endpoint)
    headings = "tokens tokens/s acceptance mean acceptance length rounds target busy"
    words = " ".join(result.stderr.split())
    assert headings in words
    assert "6 12.0 75 % 2.50 3 80 %" in words
    assert f"finish: stop · seed: {SEED} · rule: coupled · schedule: pipelined" in words


def test_json_is_one_object_with_the_promised_keys(endpoint: str) -> None:
    """`--json` writes exactly one object, and nothing else anywhere."""
    result = paceline("generate", "Why?", "--endpoint", endpoint, "--json", "--seed", "7")
    answer = json.loads(result.stdout)
    assert result.stdout.count("\n") == 1
    assert result.stderr == ""
    assert answer == {
        "text": TEXT,
        "ids": [100, 101, 102, 103, 104, 105],
        "finish_reason": "stop",
        "seed": 7,
        "usage": {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9},
        "speculation": {
            "num_drafts": 2,
            "num_draft_tokens": 4,
            "num_accepted_tokens": 3,
            "num_accepted_tokens_per_pos": [2, 1],
            "num_draft_tokens_per_pos": [2, 2],
            "acceptance_rate": 0.75,
            "mean_acceptance_length": 2.5,
            "per_token_acceptance": 0.75,
            "rounds": 3,
            "plain_rounds": 1,
            "fallback_rounds": 0,
            "ahead_rounds": 0,
            "branch_rounds": 0,
            "redraft_rounds": 0,
            "num_rejections": 0,
            "branch_hits": 0,
            "num_received_draft_tokens": 0,
            "target_busy_s": 0.4,
            "draft_wait_s": 0.05,
            "elapsed_s": 0.5,
            "rule": "coupled",
            "schedule": "pipelined",
        },
        "tokens_per_second": 12.0,
    }


def test_json_carries_every_field_of_the_protocol(endpoint: str) -> None:
    """No count that a server sends is left out of the JSON."""
    result = paceline("generate", "Why?", "--endpoint", endpoint, "--json")
    names = {field.name for field in pb.SpeculationUsage.DESCRIPTOR.fields}
    assert set(json.loads(result.stdout)["speculation"]) == names


def test_every_option_reaches_the_request(endpoint: str, service: FakeGenerationService) -> None:
    """Options are fields of the request; the prompt is one user message."""
    paceline(
        "generate", "Hi", "--endpoint", endpoint, "--temperature", "0.5", "--top-p", "0.9", "--top-k", "7",
        "--min-p", "0.05", "--repetition-penalty", "1.1", "--presence-penalty", "0.2", "--frequency-penalty", "0.3",
        "--seed", "0", "--max-tokens", "11", "--min-tokens", "2", "--stop", "END", "--stop", "\n", "--ignore-eos",
        "--rule", "rejection", "--schedule", "sequential", "--draft-length", "0", "--timeout", "30",
        "--n", "2", "--logprobs", "0", "--tenant", "acme",
    )  # fmt: skip
    assert service.requests == [
        pb.GenerateRequest(
            chat=pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="Hi")]),
            sampling=session_pb.SamplingParams(
                temperature=0.5,
                top_p=0.9,
                top_k=7,
                min_p=0.05,
                repetition_penalty=1.1,
                presence_penalty=0.2,
                frequency_penalty=0.3,
                min_tokens=2,
            ),
            stopping=pb.StopConditions(max_tokens=11, stop=["END", "\n"], ignore_eos=True),
            speculation=pb.SpeculationOptions(
                rule=session_pb.VERIFICATION_RULE_REJECTION, draft_length=0, schedule=pb.SCHEDULE_SEQUENTIAL
            ),
            seed=0,
            n=2,
            logprobs=0,
            tenant="acme",
        )
    ]
    assert 0 < service.deadlines_s[0] <= 31


def test_several_answers_stand_one_below_the_other(endpoint: str) -> None:
    """They come mixed and are written one after the other; their seeds, and a line of numbers each, are beside them."""
    seeds = [2**64 - 3 + choice for choice in range(3)]
    result = paceline("generate", "Why?", "--endpoint", endpoint, "--n", "3", "--seed", str(seeds[0]))
    assert result.exit_code == 0
    assert result.stdout == f"{TEXT}\n" * 3
    words = " ".join(result.stderr.split())
    headers = " ".join(f"choice {choice}, seed {seed}:" for choice, seed in enumerate(seeds))
    assert words.startswith(f"{headers} choice tokens tokens/s")
    for choice, seed in enumerate(seeds):
        assert f"{choice} 6 12.0 75 % 3 stop {seed}" in words


def test_first_answer_is_written_while_it_comes(endpoint: str, service: FakeGenerationService) -> None:
    """What breaks off in the middle has shown the first choice as far as it came, and nothing of those behind it."""

    def answer(request: pb.GenerateRequest) -> Iterator[pb.GenerateResponse]:
        yield from list(canned_answer(request))[:5]
        raise ContextTooLong("The prompt is too long.")

    service.answer = answer
    result = paceline("generate", "Why?", "--endpoint", endpoint, "--n", "2")
    assert (result.exit_code, result.stdout) == (1, "The sky is blue\n")


def test_several_answers_are_one_json_object(endpoint: str) -> None:
    """`choices` lists them, each with the keys that an only answer has."""
    (alone, several) = (
        json.loads(paceline("generate", "Why?", "--endpoint", endpoint, "--json", "--seed", "7", "--n", n).stdout)
        for n in ("1", "2")
    )
    assert several == {"choices": [alone, alone | {"seed": 8}]}


def test_log_probabilities_are_a_line_a_token(endpoint: str) -> None:
    """Each token with its own, and the most probable ones in its place with their text, a table a choice."""
    result = paceline("generate", "Why?", "--endpoint", endpoint, "--logprobs", "2", "--n", "2")
    assert result.stdout == f"{TEXT}\n" * 2
    words = " ".join(result.stderr.split())
    for choice in range(2):
        assert f"choice {choice} logprob most probable" in words
    assert words.count("' sky' -0.25 ' t0' -0.50 ' t1' -1.00") == 2


def test_log_probabilities_stand_in_the_json_where_asked_for(endpoint: str) -> None:
    """One entry a token; 0 gives the token's own alone."""
    answers = [
        json.loads(paceline("generate", "Why?", "--endpoint", endpoint, "--json", "--logprobs", count).stdout)
        for count in ("0", "1")
    ]
    assert answers[0]["logprobs"][5] == {"id": 105, "logprob": -0.25, "top": []}
    assert answers[1]["logprobs"][0]["top"] == [{"id": 0, "piece": " t0", "logprob": -0.5}]
    assert [len(answer["logprobs"]) for answer in answers] == [6, 6]


def test_raw_prompt_is_sent_as_text(endpoint: str, service: FakeGenerationService) -> None:
    """`--raw` leaves the chat template out."""
    paceline("generate", "Once upon", "--raw", "--endpoint", endpoint)
    assert service.requests[0].WhichOneof("prompt") == "text"
    assert service.requests[0].text == "Once upon"


def test_dash_reads_the_prompt_from_standard_input(endpoint: str, service: FakeGenerationService) -> None:
    """What is piped in is the prompt; only its last line end is cut."""
    paceline("generate", "-", "--raw", "--endpoint", endpoint, standard_input=" Zwei\nZeilen ä\n\n")
    assert service.requests[0].text == " Zwei\nZeilen ä\n"


def test_drafts_are_shown_in_colours_with_a_legend(endpoint: str) -> None:
    """On a terminal each origin has its look; the legend names and counts them."""
    result = paceline("generate", "Why?", "--endpoint", endpoint, "--show-drafts", FORCE_COLOR="1")
    assert f"{ESCAPE}[32m sky{ESCAPE}[0m" in result.stdout  # accepted draft
    assert f"{ESCAPE}[4;31mday{ESCAPE}[0m" in result.stdout  # correction
    assert f"{ESCAPE}[1;36m blue{ESCAPE}[0m" in result.stdout  # bonus
    assert result.stdout.startswith("The")  # plain
    assert "tokens by origin: accepted draft 3 · correction 1 · bonus 1 · plain 1" in uncoloured(result.stderr)


def test_drafts_without_a_terminal_are_plain_text(endpoint: str) -> None:
    """A pipe gets no colour codes; the legend still counts."""
    result = paceline("generate", "Why?", "--endpoint", endpoint, "--show-drafts")
    assert ESCAPE not in result.output
    assert "accepted draft 3" in result.stderr


def test_control_characters_do_not_reach_a_terminal(endpoint: str, service: FakeGenerationService) -> None:
    """A model cannot move the cursor of the person who reads it; a pipe gets the text as it is."""

    def answer(request: pb.GenerateRequest) -> Iterator[pb.GenerateResponse]:
        for event in canned_answer(request):
            if event.WhichOneof("event") == "delta":
                event.delta.text = "\x1b]0;title\x07a\tb\n"
            yield event

    service.answer = answer
    assert "\x1b]0" not in paceline("generate", "Why?", "--endpoint", endpoint, FORCE_COLOR="1").stdout
    assert "\x1b]0;title\x07a\tb\n" in paceline("generate", "Why?", "--endpoint", endpoint).stdout


# ---------------------------------------------------------------------------------------------------------------------
# generate: a file of prompts


def lines_of(path: Path, *lines: Mapping[str, object] | str) -> str:
    """A file with one JSON object (or whatever text is given) a line."""
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text(text + "\n", encoding="utf-8")
    return str(path)


def test_prompts_are_answered_in_order_though_they_run_at_once(
    endpoint: str, service: FakeGenerationService, tmp_path: Path
) -> None:
    """The first request ends only when the last has been answered, and still its line comes first."""
    last_answered = threading.Event()

    def answer(request: pb.GenerateRequest) -> Iterator[pb.GenerateResponse]:
        if prompt_of(request) == "a":
            assert last_answered.wait(30)
        yield from canned_answer(request)
        if prompt_of(request) == "d":
            last_answered.set()

    service.answer = answer
    prompts = lines_of(tmp_path / "prompts", *({"prompt": name, "seed": seed} for seed, name in enumerate("abcd")))
    result = paceline("generate", "--prompts", prompts, "--endpoint", endpoint, "--concurrency", "2")
    assert result.exit_code == 0
    assert [json.loads(line)["seed"] for line in result.stdout.splitlines()] == [0, 1, 2, 3]


class CountingClient(GenerationClient):
    """Answers nothing, but knows how many requests ran at once."""

    def __init__(self) -> None:
        super().__init__("127.0.0.1:1")
        self.running = 0
        self.most_running = 0

    async def complete_choices(
        self, request: GenerationRequest, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> tuple[Completion, ...]:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        # Every request that may run begins before the first ends.
        for _ in range(20):
            await asyncio.sleep(0)
        self.running -= 1
        return (completion(elapsed_s=1.0),)


@pytest.mark.parametrize("concurrency", [1, 3])
async def test_no_more_than_so_many_run_at_once(concurrency: int) -> None:
    """`--concurrency` is reached, and never exceeded."""
    client, outcomes = CountingClient(), list[Outcome]()
    requests = [GenerationRequest(text=str(number)) for number in range(10)]
    failures = await complete_all(client, requests, concurrency=concurrency, timeout_s=1.0, report=outcomes.append)
    assert (client.most_running, len(outcomes), failures) == (concurrency, 10, 0)


def test_each_line_overrides_the_options(endpoint: str, service: FakeGenerationService, tmp_path: Path) -> None:
    """Any field may stand in a line and wins over the option; what is not there is taken from the option."""
    everything = {
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        "temperature": 0,
        "top_k": 5,
        "top_p": 0.5,
        "min_p": 0.1,
        "repetition_penalty": 1.5,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "logit_bias": {"15": -100, "3": 0.5},
        "banned_token_ids": [1],
        "allowed_token_ids": [2, 3],
        "min_tokens": 1,
        "max_tokens": 4,
        "stop": ["x"],
        "stop_token_ids": [9],
        "ignore_eos": True,
        "rule": "coupled",
        "schedule": "plain",
        "draft_length": 8,
        "seed": SEED,
        "raw": False,
    }
    prompts = lines_of(tmp_path / "prompts", everything, "", {"token_ids": [4, 5], "raw": None})
    options = ("--temperature", "0.7", "--seed", "1", "--stop", "END", "--concurrency", "1")
    result = paceline("generate", "--prompts", prompts, "--endpoint", endpoint, *options)
    assert result.exit_code == 0
    first, second = service.requests
    assert first == pb.GenerateRequest(
        chat=pb.ChatMessages(
            messages=[pb.ChatMessage(role="system", content="Be brief."), pb.ChatMessage(role="user", content="Hi")]
        ),
        sampling=session_pb.SamplingParams(
            temperature=0,
            top_k=5,
            top_p=0.5,
            min_p=0.1,
            repetition_penalty=1.5,
            presence_penalty=1,
            frequency_penalty=-1,
            logit_bias=[
                session_pb.LogitBias(token_id=15, bias=-100),
                session_pb.LogitBias(token_id=3, bias=0.5),
            ],
            banned_token_ids=[1],
            allowed_token_ids=session_pb.TokenIds(ids=[2, 3]),
            min_tokens=1,
        ),
        stopping=pb.StopConditions(max_tokens=4, stop=["x"], stop_token_ids=[9], ignore_eos=True),
        speculation=pb.SpeculationOptions(
            rule=session_pb.VERIFICATION_RULE_COUPLED, draft_length=8, schedule=pb.SCHEDULE_PLAIN
        ),
        seed=SEED,
    )
    assert list(second.token_ids.ids) == [4, 5]
    assert (second.sampling.temperature, second.seed, list(second.stopping.stop)) == (0.7, 1, ["END"])


def test_failed_request_leaves_the_others_alone(endpoint: str, service: FakeGenerationService, tmp_path: Path) -> None:
    """Its line says why, the other lines are answers, and the exit status is 1."""

    def answer(request: pb.GenerateRequest) -> Iterator[pb.GenerateResponse]:
        if prompt_of(request) == "long":
            raise ContextTooLong("The prompt is too long; shorten it.")
        yield from canned_answer(request)

    service.answer = answer
    prompts = lines_of(tmp_path / "prompts", {"prompt": "a"}, {"prompt": "long"}, {"prompt": "b"})
    result = paceline("generate", "--prompts", prompts, "--endpoint", endpoint)
    first, second, third = map(json.loads, result.stdout.splitlines())
    assert (first["text"], third["text"]) == (TEXT, TEXT)
    assert second == {"error": {"reason": "CONTEXT_TOO_LONG", "message": "The prompt is too long; shorten it."}}
    assert result.exit_code == 1
    assert "1 of 3 requests failed" in result.stderr


def test_prompts_can_come_from_standard_input(endpoint: str) -> None:
    """`--prompts -` makes the command a filter."""
    result = paceline(
        "generate", "--prompts", "-", "--endpoint", endpoint, standard_input='{"prompt": "a", "seed": 5}\n'
    )
    assert json.loads(result.stdout)["seed"] == 5


def test_no_prompts_are_no_output(endpoint: str, tmp_path: Path) -> None:
    """An empty file is answered by nothing, successfully."""
    result = paceline("generate", "--prompts", lines_of(tmp_path / "prompts", ""), "--endpoint", endpoint)
    assert (result.exit_code, result.output) == (0, "")


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ({"prompt": "a", "temprature": 0}, "has the unknown field temprature; did you mean temperature?"),
        ({"prompt": "a", "zzz": 2}, "has the unknown field zzz; the fields are prompt, messages, token_ids"),
        ({"prompt": "a", "n": 17}, "n must lie in [1, 16], not 17"),
        ({"prompt": "a", "logprobs": 21}, "logprobs must lie in [0, 20], not 21"),
        ({"prompt": "a", "tenant": "x" * 257}, "tenant must have at most 256 characters, not 257"),
        (
            {"messages": [{"role": "user", "contents": "a"}]},
            "unknown field messages[0].contents; did you mean content?",
        ),
        ({"messages": [{"role": "user"}]}, "messages[0].content is missing"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role: input should be 'system', 'user'"),
        ({"prompt": "a", "temperature": "0"}, "temperature: input should be a valid number, not '0'"),
        ({"prompt": "a", "max_tokens": 1.5}, "max_tokens: input should be a valid integer"),
        ({"prompt": "a", "max_tokens": True}, "max_tokens: input should be a valid integer"),
        ({"prompt": "a", "stop": "x"}, "stop: input should be a valid"),
        ({"prompt": "a", "logit_bias": {"a": 1}}, "logit_bias.a"),
        ({"prompt": "a", "schedule": "fast"}, "schedule: input should be 'plain', 'sequential' or 'pipelined'"),
        ({"prompt": "a", "rule": "greedy"}, "rule: input should be 'rejection' or 'coupled'"),
        ({"prompt": 5}, "prompt: input should be a valid string, not 5"),
        ({"prompt": "a", "temperature": -1}, "temperature must lie in [0, 100], not -1"),
        ('{"prompt": "a", "temperature": NaN}', "temperature must be a finite number"),
        ({"prompt": "a", "seed": -1}, "seed must lie in [0, 18446744073709551615], not -1"),
        ({"prompt": "a", "draft_length": 65}, "draft_length must lie in [0, 64], not 65"),
        ({"prompt": "a", "token_ids": [1]}, "needs one prompt"),
        ({"prompt": "a", "messages": []}, "needs one prompt"),
        ({"messages": [], "raw": True}, "raw means no chat template"),
        ({}, "needs one prompt"),
        ("[1]", "must be a JSON object"),
        ('"a"', "must be a JSON object"),
        ("{", "is no JSON"),
        ('{"prompt": "\\ud800"}', "is no JSON"),
    ],
)
def test_bad_line_is_refused_by_place_and_field_before_anything_runs(
    endpoint: str, service: FakeGenerationService, tmp_path: Path, line: dict[str, object] | str, complaint: str
) -> None:
    """The refusal names file, line and field, with the nearest valid name; the good line before it is not sent."""
    prompts = lines_of(tmp_path / "prompts.jsonl", {"prompt": "good"}, "", line)
    words = refused(paceline("generate", "--prompts", prompts, "--endpoint", endpoint), status=1)
    assert words.startswith("prompts.jsonl, line 3: ")
    assert complaint in words
    assert words.endswith("[INVALID_ARGUMENT]")
    assert service.requests == []


def test_file_that_cannot_be_read_is_a_sentence(tmp_path: Path) -> None:
    """A wrong path is told, before a server is looked for."""
    words = refused(paceline("generate", "--prompts", str(tmp_path / "missing"), "--endpoint", "127.0.0.1:1"), status=1)
    assert "missing cannot be read: No such file or directory" in words


# ---------------------------------------------------------------------------------------------------------------------
# generate: refusals


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "give either PROMPT or --prompts FILE"),
        (["Hi", "--prompts", "file"], "give either PROMPT or --prompts FILE"),
        (["Hi", "--endpoint", "127.0.0.1:1", "--target", "m"], "--endpoint names what runs"),
        (["Hi", "--endpoint", "127.0.0.1:1", "--drafter", "none"], "--endpoint names what runs"),
        (["Hi", "--show-drafts", "--json"], "--show-drafts is for people"),
        (["Hi", "--schedule", "fast"], "Invalid value for '--schedule'"),
        (["Hi", "--rule", "greedy"], "Invalid value for '--rule'"),
        (["Hi", "--draft-length", "65"], "Invalid value for '--draft-length'"),
        (["Hi", "--temprature", "0"], "--temprature"),
    ],
)
def test_contradicting_options_are_usage_errors(arguments: list[str], complaint: str) -> None:
    """What cannot be meant is refused with exit status 2."""
    assert complaint in refused(paceline("generate", *arguments))


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--temperature", "-1"], "temperature must lie in [0, 100], not -1.0. [INVALID_ARGUMENT]"),
        (["--top-p", "0"], "top_p must lie in (0, 1], not 0"),
        (["--seed", str(2**64)], f"seed must lie in [0, {2**64 - 1}]"),
        (["--stop", ""], "stop must not hold an empty string"),
        (["--n", "0"], "n must lie in [1, 16], not 0"),
    ],
)
def test_values_out_of_range_are_sentences(
    endpoint: str, service: FakeGenerationService, arguments: list[str], complaint: str
) -> None:
    """A value that no server could honour is refused here, by name, with exit status 1."""
    assert complaint in refused(paceline("generate", "Hi", "--endpoint", endpoint, *arguments), status=1)
    assert service.requests == []


def test_prompt_that_is_no_text_is_a_sentence(endpoint: str) -> None:
    """Bytes that are no UTF-8 are refused, as an argument and on standard input."""
    argument = paceline("generate", os.fsdecode(b"\xff"), "--endpoint", endpoint)
    assert "must be valid Unicode text" in refused(argument, status=1)
    piped = paceline("generate", "-", "--endpoint", endpoint, standard_input=b"\xff")
    assert "Standard input is no UTF-8 text" in refused(piped, status=1)


def test_errors_of_the_server_are_one_sentence(endpoint: str, service: FakeGenerationService) -> None:
    """Sentence and reason of the server stand on standard error, red on a terminal; the exit status is 1."""

    def answer(request: pb.GenerateRequest) -> Iterator[pb.GenerateResponse]:
        yield from list(canned_answer(request))[:2]
        raise ContextTooLong("The prompt is too long; shorten it.")

    service.answer = answer
    result = paceline("generate", "Hi", "--endpoint", endpoint)
    assert result.exit_code == 1
    assert result.stdout == "The\n"
    assert result.stderr == "The prompt is too long; shorten it. [CONTEXT_TOO_LONG]\n"
    coloured = paceline("generate", "Hi", "--endpoint", endpoint, FORCE_COLOR="1")
    assert f"{ESCAPE}[1;31mThe prompt is too long" in coloured.stderr
    assert paceline("generate", "Hi", "--endpoint", endpoint, "--json").stdout == ""


def test_silent_endpoint_is_a_sentence_with_a_remedy(endpoint: str) -> None:
    """Whoever forgot to start the server is told how."""
    with serving(FakeGenerationService()) as gone:
        pass
    words = refused(paceline("generate", "Hi", "--endpoint", gone, "--json"), status=1)
    assert words.startswith(f"Nothing answers at {gone}; start it with `paceline up` or `paceline serve`")
    assert words.endswith("[SERVER_UNAVAILABLE]")
    assert "HOST:PORT" in refused(paceline("generate", "Hi", "--endpoint", "nonsense", "--json"), status=1)


# ---------------------------------------------------------------------------------------------------------------------
# Commands that start the services


def test_generate_starts_and_stops_its_own_services(stand_ins: FakeStack) -> None:
    """Without an endpoint three processes live as long as the command."""
    result = paceline("generate", "Hi", "--target", "big", "--drafter", "small", "--rule", "rejection", "--json")
    assert json.loads(result.stdout)["text"] == TEXT
    assert stand_ins.arguments("target")["--model"] == "big"
    assert stand_ins.arguments("drafter")["--model"] == "small"
    assert stand_ins.arguments("orchestrator")["--rule"] == "rejection"
    assert not any(is_alive(stand_ins.pid(service)) for service in ("target", "drafter", "orchestrator"))


def test_service_that_cannot_start_is_a_sentence(stand_ins: FakeStack) -> None:
    """The sentence of the service is the sentence of the command."""
    stand_ins.behave("target", Behaviour(failure="There is no model 'bigg'; check the name."))
    words = refused(paceline("generate", "Hi", "--target", "bigg"), status=1)
    assert words == "The target cannot start: There is no model 'bigg'; check the name. [STARTUP_FAILED]"


def test_bad_value_starts_nothing(stand_ins: FakeStack) -> None:
    """Nobody waits for models to learn that a number is wrong."""
    refused(paceline("generate", "Hi", "--temperature", "-1"), status=1)
    assert not stand_ins.started("target")


def test_demo_compares_the_schedules_honestly(stand_ins: FakeStack) -> None:
    """It streams one answer with its legend, then a line a prompt, words on speed, and whether the answers agree."""
    result = paceline("demo", "--draft-length", "4", "--max-tokens", "6")
    assert result.exit_code == 0
    words = " ".join(result.stdout.split())
    assert "fake-target, float32" in words
    assert "prompt lookup (n-gram), drafts of 4 tokens" in words
    assert "accepted draft 3 · correction 1 · bonus 1 · plain 1" in words
    assert all(prompt.name in words for prompt in PROMPTS)
    assert "as fast as plain decoding, within the noise of the measurement (1.00 times)" in words
    assert f"All three schedules gave the same tokens for each of the {len(PROMPTS)} prompts." in words
    assert not any(is_alive(stand_ins.pid(service)) for service in ("target", "drafter", "orchestrator"))


def test_demo_warns_on_a_busy_machine() -> None:
    """Speeds that were measured beside other work are not passed off as the machine's."""
    assert list(load_warning(2.0, cores=2)) == []
    assert "busy with other work (load 5.5)" in next(load_warning(5.51, cores=2))


def test_demo_without_a_drafter_is_refused() -> None:
    """There would be nothing to compare."""
    assert "needs a drafter" in refused(paceline("demo", "--drafter", "none"))
    assert "needs a drafter" in refused(paceline("demo", "--draft-length", "0"))


def test_interrupt_in_mid_answer_cancels_it_quietly(endpoint: str, service: FakeGenerationService) -> None:
    """Ctrl-C while an answer streams exits with 130, after what had come, and the server is told."""

    def answer(request: pb.GenerateRequest) -> Iterator[pb.GenerateResponse]:
        yield from list(canned_answer(request))[:2]
        # Never over by itself: only the client can end the call.
        while not service.ended.wait(0.05):
            yield pb.GenerateResponse()

    service.answer = answer
    with started("generate", "Hi", "--endpoint", endpoint) as process:
        assert process.stdout is not None
        assert process.stdout.read(3) == "The"
        process.send_signal(signal.SIGINT)
        assert end(process) == (130, "\n")
    assert service.ended.wait(30)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("Unpacking the model (once) ...", "Unpacking the model (once) ..."),
        ('{"event": "drafter lost", "address": "a:1", "level": "warning", "timestamp": "t", "service": "orchestrator"}',
         "warning drafter lost (address a:1)"),
        ('{"event": "ready"}', "ready"),
        ("[1]", "[1]"),
    ],
)  # fmt: skip
def test_log_lines_are_shown_in_words(line: str, words: str) -> None:
    """`up` shows structured log lines as a person would read them, and sentences as they are."""
    assert readable(line) == words


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_up_answers_until_it_is_stopped(stand_ins: FakeStack, number: signal.Signals, status: int) -> None:
    """The first line is the endpoint, which answers; Ctrl-C or SIGTERM stops all services without a word."""
    with started("up", "--log-level", "error") as process:
        assert process.stdout is not None
        endpoint = process.stdout.readline().strip()
        assert paceline("generate", "Hi", "--endpoint", endpoint).stdout == TEXT + "\n"
        process.send_signal(number)
        returned, output = end(process)
    assert returned == status
    assert "Traceback" not in output
    assert not any(is_alive(stand_ins.pid(service)) for service in ("target", "drafter", "orchestrator"))


def test_up_goes_on_without_its_drafter_but_not_without_its_target(stand_ins: FakeStack) -> None:
    """A lost drafter is reported and costs only speed; a lost target ends the command with an error."""
    with started("up") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        endpoint = process.stdout.readline().strip()
        os.kill(stand_ins.pid("drafter"), signal.SIGKILL)
        while "The drafter has ended" not in (line := process.stderr.readline()):
            assert line, "the command must not end"
        assert paceline("generate", "Hi", "--endpoint", endpoint, "--json").exit_code == 0
        os.kill(stand_ins.pid("target"), signal.SIGKILL)
        status, output = end(process)
    assert status == 1
    assert "The target has ended: It was killed by SIGKILL." in output
    assert "[TARGET_UNAVAILABLE]" in output
    assert wait_until_gone(stand_ins.pid("orchestrator"))


def test_interrupt_while_starting_is_quiet(stand_ins: FakeStack) -> None:
    """Ctrl-C before the services are ready exits with 130 and leaves nothing behind."""
    stand_ins.behave("target", Behaviour(never_ready=True, log="loading"))
    with started("up", "--log-level", "info") as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "target: loading\n"
        process.send_signal(signal.SIGINT)
        assert end(process) == (130, "")
    assert wait_until_gone(stand_ins.pid("target"))


def test_up_says_where_http_answers(stand_ins: FakeStack) -> None:
    """On the usual port unless somebody else has it; an own choice is kept to."""
    with started("up") as process:
        assert process.stderr is not None
        while not (line := process.stderr.readline()).startswith("OpenAI-compatible HTTP"):
            assert line, "the command must not end"
        assert f"{HTTP_URL}/v1" in line
        assert stand_ins.arguments("orchestrator")["--http-port"] in ("8000", "0")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        words = refused(paceline("up", "--http-port", port), status=1)
    assert words.startswith(f"Port {port} on 127.0.0.1 cannot be opened")
    assert "--http-port" in words


def test_up_with_a_taken_port_is_a_sentence(stand_ins: FakeStack, endpoint: str) -> None:
    """The port of another server is not taken over, and no model is loaded for nothing."""
    port = endpoint.rpartition(":")[2]
    words = refused(paceline("up", "--port", port), status=1)
    assert words.startswith(f"Port {port} on 127.0.0.1 cannot be opened")
    assert not stand_ins.started("target")


# ---------------------------------------------------------------------------------------------------------------------
# The comparison of the demo


def completion(*, elapsed_s: float, ids: tuple[int, ...] = (1, 2, 3, 4), drafts: int = 1) -> Completion:
    """Four tokens in so many seconds."""
    return Completion(
        request_id="r",
        text="abcd",
        token_ids=ids,
        origins=(Origin.DRAFT,) * len(ids),
        pieces=tuple(chr(ord("a") + token_id - 1) for token_id in ids),
        finish_reason=FinishReason.LENGTH,
        seed=0,
        usage=Usage(prompt_tokens=1, completion_tokens=len(ids)),
        speculation=SpeculationUsage(
            num_drafts=drafts, num_draft_tokens=4 * drafts, num_accepted_tokens=3 * drafts, elapsed_s=elapsed_s
        ),
    )


def runs_of(name: str, *, plain: float, sequential: float, pipelined: float) -> PromptRuns:
    """The three answers, with their times in seconds."""
    return PromptRuns(
        name,
        {
            Schedule.PLAIN: completion(elapsed_s=plain, drafts=0),
            Schedule.SEQUENTIAL: completion(elapsed_s=sequential),
            Schedule.PIPELINED: completion(elapsed_s=pipelined),
        },
    )


FAST = runs_of("quote", plain=4.0, sequential=2.0, pipelined=1.0)
SLOW = runs_of("chat", plain=4.0, sequential=8.0, pipelined=5.0)
EVEN = runs_of("even", plain=4.0, sequential=4.0, pipelined=4.1)


def drawn(runs: list[PromptRuns]) -> list[list[str]]:
    """The words of each line of the table."""
    console = Console(width=80, record=True, file=open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    console.print(comparison_table(runs))
    return [line.split() for line in console.export_text().splitlines()]


def test_comparison_shows_speed_gain_and_outcome_of_each_prompt() -> None:
    """A line a prompt and one for all, where tokens and seconds are added up before they are divided."""
    lines = drawn([FAST, SLOW, EVEN])
    assert ["quote", "1.0", "2.0", "2.00x", "4.0", "4.00x", "75", "%", "4.00", "wins"] in lines
    assert ["chat", "1.0", "0.5", "0.50x", "0.8", "0.80x", "75", "%", "4.00", "loses"] in lines
    assert ["even", "1.0", "1.0", "1.00x", "1.0", "0.98x", "75", "%", "4.00", "even"] in lines
    assert ["all", "1.0", "0.9", "0.86x", "1.2", "1.19x", "75", "%", "4.00", "wins"] in lines


def test_words_say_where_speculation_loses() -> None:
    """The overall gain and every losing prompt are put into words."""
    assert list(verdict_on_speed([FAST, SLOW])) == [
        "Overall, sequential speculation is slower than plain decoding (0.80 times its speed).",
        "Overall, pipelined speculation is 1.33 times as fast as plain decoding.",
        'Speculation loses on "chat": plain decoding is the better choice there.',
    ]
    assert len(list(verdict_on_speed([FAST, EVEN]))) == 2
    assert 'loses on "chat", "chat" and "chat"' in list(verdict_on_speed([SLOW, SLOW, SLOW]))[-1]


def test_equal_answers_are_stated() -> None:
    """The promise of the project is checked in front of the reader."""
    assert list(verdict_on_equality([FAST, SLOW], dtype="float32")) == [
        "All three schedules gave the same tokens for each of the 2 prompts."
    ]


@pytest.mark.parametrize(
    ("ids", "place"),
    [((1, 2, 5, 4), "from token 3 on ('e' in place of 'c')"), ((1, 2), "from token 3 on (the end in place of 'c')")],
)
def test_different_answers_are_located(ids: tuple[int, ...], place: str) -> None:
    """The first token that differs is named, with what stands there, and what rounding has to do with it."""
    answers = {**FAST.answers, Schedule.PIPELINED: replace(FAST.answers[Schedule.PIPELINED], token_ids=ids)}
    pieces = tuple(chr(ord("a") + token_id - 1) for token_id in ids)
    answers[Schedule.PIPELINED] = replace(answers[Schedule.PIPELINED], pieces=pieces)
    run = PromptRuns("quote", answers)
    exact = list(verdict_on_equality([run], dtype="float32"))
    assert exact[0] == f'"quote": the pipelined answer differs from the plain one {place}.'
    assert "please report it" in exact[1]
    assert "a near tie" in list(verdict_on_equality([run], dtype="bfloat16"))[1]


def test_every_schedule_is_compared() -> None:
    """The demo leaves no schedule out."""
    assert set(SCHEDULES) == set(Schedule)


def test_help_names_every_command_and_option() -> None:
    """The commands and the options of the contract are there."""
    assert all(command in paceline("--help").stdout for command in ("generate", "demo", "up", "serve", "status"))
    options: dict[str, Any] = {
        "generate": [
            "--endpoint",
            "--prompts",
            "--concurrency",
            "--show-drafts",
            "--raw",
            "--json",
            "--min-p",
            "--n",
            "--logprobs",
            "--tenant",
        ],
        "up": ["--port", "--target", "--drafter", "--schedule", "--rule", "--draft-length", "--dtype", "--logit-noise"],
        "demo": ["--target", "--drafter", "--draft-length", "--max-tokens", "--ray"],
        "serve": ["--config", "--address", "--sim-cluster", "--port"],
        "status": ["--endpoint", "--watch", "--interval", "--json"],
    }
    for command, names in options.items():
        shown = uncoloured(paceline(command, "--help").stdout)
        assert all(name in shown for name in names)
