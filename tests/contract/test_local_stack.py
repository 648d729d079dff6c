"""The process stack with stand-ins for the services: what is started how, and that nothing is ever left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.errors import StartupFailed
from paceline.local_stack import LocalStack, LocalStackSettings, available_cores, plan_threads
from tests.fake_stack import FakeStack, install, is_alive, wait_until_gone
from tests.stand_in import HTTP_URL, Behaviour


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeStack:
    return install(tmp_path, monkeypatch)


# ---------------------------------------------------------------------------------------------------------------------
# What is started


def test_orchestrator_is_told_where_both_models_are(fakes: FakeStack) -> None:
    """The addresses in the ready lines of target and drafter become options of the orchestrator."""
    with LocalStack(LocalStackSettings()) as stack:
        assert stack.target is not None
        assert stack.drafter is not None
        told = fakes.arguments("orchestrator")
        assert told["--target"] == stack.target.address
        assert told["--drafter"] == stack.drafter.address
        assert [process.name for process in stack.processes] == ["orchestrator", "target", "drafter"]
        assert stack.target.pid == fakes.pid("target")
        assert stack.endpoint.startswith("127.0.0.1:")


def test_settings_become_options(fakes: FakeStack) -> None:
    """Every setting reaches the service it concerns."""
    settings = LocalStackSettings(
        target="big", drafter="small", schedule="sequential", rule="rejection", draft_length=7, dtype="float32",
        logit_noise=0.5, log_level="info", reflection=True,
    )  # fmt: skip
    with LocalStack(settings) as stack:
        target, drafter, orchestrator = map(fakes.arguments, ("target", "drafter", "orchestrator"))
        threads = stack.threads
    for told in (target, drafter, orchestrator):
        assert told["--stop-with-parent"] == ""
        assert (told["--host"], told["--port"], told["--log-level"]) == ("127.0.0.1", "0", "info")
    assert (target["--model"], target["--dtype"], target["--threads"]) == ("big", "float32", str(threads.target))
    assert (drafter["--method"], drafter["--model"], drafter["--dtype"]) == ("draft_model", "small", "float32")
    assert (drafter["--logit-noise"], drafter["--threads"]) == ("0.5", str(threads.drafter))
    assert (orchestrator["--schedule"], orchestrator["--rule"]) == ("sequential", "rejection")
    assert orchestrator["--draft-length"] == "7"
    assert orchestrator["--reflection"] == ""


def test_what_is_not_set_is_left_to_the_services(fakes: FakeStack) -> None:
    """Defaults of models, rule, schedule and draft length are the services' own."""
    with LocalStack(LocalStackSettings()):
        assert "--model" not in fakes.arguments("target")
        assert not {"--schedule", "--rule", "--draft-length", "--reflection"} & set(fakes.arguments("orchestrator"))


def test_http_is_off_unless_it_has_a_port(fakes: FakeStack) -> None:
    """With one, any free one too, the orchestrator's ready line says the URL."""
    with LocalStack(LocalStackSettings()) as stack:
        assert "--http-port" not in fakes.arguments("orchestrator")
        assert stack.http_url == ""
    with LocalStack(LocalStackSettings(http_port=0)) as stack:
        assert fakes.arguments("orchestrator")["--http-port"] == "0"
        assert stack.http_url == HTTP_URL


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_a_lookup_needs_no_model(fakes: FakeStack, method: str) -> None:
    """Drafter `ngram` or `suffix` is a drafter service with that method, no model, and one thread."""
    with LocalStack(LocalStackSettings(drafter=method)):
        told = fakes.arguments("drafter")
    assert (told["--method"], told["--threads"]) == (method, "1")
    assert not {"--model", "--dtype", "--logit-noise"} & set(told)


def test_a_model_may_be_combined_with_suffix_decoding(fakes: FakeStack) -> None:
    """`hybrid:` before the model's name."""
    with LocalStack(LocalStackSettings(drafter="hybrid:org/small")):
        told = fakes.arguments("drafter")
    assert (told["--method"], told["--model"]) == ("hybrid", "org/small")


def test_no_drafter_is_no_process(fakes: FakeStack) -> None:
    """Drafter `none` starts two processes, and the orchestrator hears of no drafter."""
    with LocalStack(LocalStackSettings(drafter="none")) as stack:
        assert [process.name for process in stack.processes] == ["orchestrator", "target"]
        assert "--drafter" not in fakes.arguments("orchestrator")
    assert not fakes.started("drafter")


@pytest.mark.parametrize(
    ("cores", "has_neural_drafter", "target", "drafter"),
    [(1, False, 1, 1), (8, False, 8, 1), (1, True, 1, 1), (2, True, 1, 1), (3, True, 2, 1), (8, True, 4, 4)],
)
def test_cores_are_divided(cores: int, has_neural_drafter: bool, target: int, drafter: int) -> None:
    """Prompt lookup leaves the target all cores; a neural drafter takes half, and both get at least one."""
    plan = plan_threads(cores, has_neural_drafter=has_neural_drafter)
    assert (plan.cores, plan.target, plan.drafter) == (cores, target, drafter)


def test_there_is_at_least_one_core() -> None:
    """The number of cores is what this process may use."""
    assert 1 <= available_cores() <= (os.cpu_count() or 1)


def test_chatter_on_standard_output_is_no_ready_line(fakes: FakeStack) -> None:
    """A library that prints, even JSON, does not pass for a service that is ready."""
    fakes.behave("target", Behaviour(chatter='Loading 100%\n{"event": "loading"}\n[1, 2]\n"ready"'))
    with LocalStack(LocalStackSettings()) as stack:
        assert stack.target is not None
        assert stack.target.address == fakes.arguments("orchestrator")["--target"]


def test_progress_and_logs_are_reported(fakes: FakeStack) -> None:
    """The caller can show what is being waited for, and what the services say."""
    fakes.behave("target", Behaviour(log="converting the model"))
    progress: list[str] = []
    logs: list[tuple[str, str]] = []
    with LocalStack(LocalStackSettings(), on_progress=progress.append, on_log=lambda *line: logs.append(line)):
        pass
    assert progress[0] == "Starting target and drafter"
    assert progress[-1] == "Starting orchestrator"
    assert ("target", "converting the model") in logs


# ---------------------------------------------------------------------------------------------------------------------
# What cannot start


def failed_start(settings: LocalStackSettings) -> StartupFailed:
    """The error of a stack that cannot start; by then none of its processes may be left."""
    stack = LocalStack(settings)
    with pytest.raises(StartupFailed) as failure:
        stack.__enter__()
    assert not any(is_alive(process.pid) for process in stack.processes)
    return failure.value


def test_failed_start_says_the_sentence_of_the_service(fakes: FakeStack) -> None:
    """The last line of the service's log is the error, and the orchestrator is not even tried."""
    fakes.behave("target", Behaviour(log="loading", failure="There is no model 'bigg'; check the name."))
    error = failed_start(LocalStackSettings())
    assert error.message == "The target cannot start: There is no model 'bigg'; check the name."
    assert not fakes.started("orchestrator")


def test_service_that_ends_without_a_word_is_named_with_its_status(fakes: FakeStack) -> None:
    """Without a sentence there is still the exit status."""
    fakes.behave("target", Behaviour(failure="\n"))
    assert failed_start(LocalStackSettings()).message == (
        "The target cannot start: It ended with status 1 and said nothing."
    )


def test_first_failure_does_not_wait_for_a_slow_sibling(fakes: FakeStack) -> None:
    """A drafter that fails is heard although the target would load for another ten minutes."""
    fakes.behave("target", Behaviour(never_ready=True))
    fakes.behave("drafter", Behaviour(failure="The tokenizers differ."))
    assert "The drafter cannot start: The tokenizers differ" in failed_start(LocalStackSettings()).message


def test_failed_orchestrator_stops_both_models(fakes: FakeStack) -> None:
    """Models that are ready do not outlive an orchestrator that cannot start."""
    fakes.behave("orchestrator", Behaviour(failure="The target does not answer."))
    assert "The orchestrator cannot start: The target does not answer" in failed_start(LocalStackSettings()).message


def test_silent_service_runs_into_the_time_limit(fakes: FakeStack) -> None:
    """A service that never gets ready is named, and stopped."""
    fakes.behave("target", Behaviour(never_ready=True))
    error = failed_start(LocalStackSettings(start_timeout_s=1, drafter="none"))
    assert error.message == "The target did not get ready within 1 s."


def test_taken_port_is_refused_before_anything_starts(fakes: FakeStack) -> None:
    """Nobody waits for two models to learn that a port is taken."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        error = failed_start(LocalStackSettings(port=port))
    assert f"Port {port} on 127.0.0.1 cannot be opened" in error.message
    assert "choose another with --port" in error.message
    assert not fakes.started("target")


def test_port_that_does_not_exist_is_refused() -> None:
    """A port above 65535 is a sentence too."""
    assert "Port 70000" in failed_start(LocalStackSettings(port=70000)).message


# ---------------------------------------------------------------------------------------------------------------------
# The end


def test_orchestrator_stops_before_the_models(fakes: FakeStack) -> None:
    """No request meets a model that is gone, because the orchestrator has ended first; then all have."""
    with LocalStack(LocalStackSettings()) as stack:
        pids = [process.pid for process in stack.processes]
    assert not any(map(is_alive, pids))
    assert fakes.stopped_s("orchestrator") <= min(fakes.stopped_s("target"), fakes.stopped_s("drafter"))


def test_error_in_the_block_stops_everything(fakes: FakeStack) -> None:
    """Whatever ends the block ends the processes."""
    stack = LocalStack(LocalStackSettings())
    with pytest.raises(ZeroDivisionError), stack:
        raise ZeroDivisionError
    assert len(stack.processes) == 3
    assert not any(is_alive(process.pid) for process in stack.processes)


def test_interrupt_while_starting_stops_everything(fakes: FakeStack) -> None:
    """Ctrl-C before all are ready leaves none of those that were started."""

    def interrupt(sentence: str) -> None:
        if "orchestrator" in sentence:
            raise KeyboardInterrupt

    stack = LocalStack(LocalStackSettings(), on_progress=interrupt)
    with pytest.raises(KeyboardInterrupt):
        stack.__enter__()
    assert len(stack.processes) == 3
    assert not any(is_alive(process.pid) for process in stack.processes)


def test_service_that_ignores_the_request_to_stop_is_killed(fakes: FakeStack) -> None:
    """After the grace period there is no more asking."""
    fakes.behave("target", Behaviour(ignores_terminate=True))
    with LocalStack(LocalStackSettings(stop_grace_s=0.3)) as stack:
        assert stack.target is not None
        pid = stack.target.pid
    assert not is_alive(pid)


def test_service_that_was_killed_is_no_obstacle(fakes: FakeStack) -> None:
    """A stack whose target is gone says so, and still stops."""
    with LocalStack(LocalStackSettings()) as stack:
        assert stack.target is not None
        os.kill(stack.target.pid, signal.SIGKILL)
        stack.target.wait(30)
        assert not stack.target.is_running


def test_terminal_interrupt_does_not_reach_the_services(fakes: FakeStack) -> None:
    """Each service has a session of its own, so that only the parent hears of Ctrl-C."""
    with LocalStack(LocalStackSettings()) as stack:
        assert all(os.getsid(process.pid) == process.pid for process in stack.processes)


def test_services_end_when_the_parent_is_killed(fakes: FakeStack) -> None:
    """Not even SIGKILL of the parent leaves a process behind."""
    script = (
        "import time\n"
        "from paceline.local_stack import LocalStack, LocalStackSettings\n"
        "with LocalStack(LocalStackSettings()) as stack:\n"
        "    print('up', flush=True)\n"
        "    time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "up\n"
        pids = [fakes.pid(service) for service in ("target", "drafter", "orchestrator")]
        parent.kill()
    assert all(wait_until_gone(pid) for pid in pids)


def test_start_and_stop_take_little_time(fakes: FakeStack) -> None:
    """Processes that stop when asked are not waited for any longer: far below the grace period of a minute."""
    with LocalStack(LocalStackSettings(stop_grace_s=60)):
        begin_s = time.monotonic()
    assert time.monotonic() - begin_s < 30
