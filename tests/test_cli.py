"""The command line, run as a person runs it: processes, exit codes, what is printed where."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import httpx
import pytest
from openai import OpenAI

from prefixkv import __version__
from prefixkv.cli import main
from prefixkv.config import EngineOptions

TIMEOUT = 120
ENDLESS = ("--max-tokens", "4000", "--num-blocks", "300")
SMALL = ("--num-blocks", "64", "--threads", "1", "--dtype", "float32")
PROMPT = "The quick brown fox jumps over the lazy dog while the cat sleeps."


def run(*args: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "prefixkv", *args],
        input=text,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )


def _heed_ctrl_c() -> None:
    """As in a terminal, also where the tests run in the background of a shell, which ignores it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def started(*args: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "prefixkv", *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        preexec_fn=_heed_ctrl_c,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def serving(model: Path, *args: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server process and its URL, once it says that it is ready."""
    with started("serve", "--model", str(model), "--port", "0", *SMALL, *args) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "http://" in line:
                url = line[line.index("http://") :].strip()
                assert "blocks" in next(process.stderr)  # the summary
                yield process, url.removesuffix("/v1")
                return
        raise AssertionError("the server ended before it was ready")


def signalled(process: subprocess.Popen[str], number: signal.Signals) -> tuple[int, str]:
    """The exit code after a signal and what was still printed on stderr."""
    process.send_signal(number)
    _, errors = process.communicate(timeout=TIMEOUT)
    return process.returncode, errors.strip()


class TestHelp:
    def test_names_the_commands(self) -> None:
        text = run("--help").stdout
        assert all(command in text for command in ("serve", "generate", "chat", "demo"))
        assert "..." not in text.partition("Commands:")[2]

    def test_names_the_variable_of_the_cache_directory(self) -> None:
        assert "PREFIXKV_CACHE_DIR" in run("--help").stdout

    def test_no_command_is_misuse_and_gets_the_help(self) -> None:
        done = run()
        assert (done.returncode, done.stdout) == (2, "")
        assert "Commands:" in done.stderr

    @pytest.mark.parametrize("command", ["serve", "generate", "chat", "demo"])
    def test_every_engine_option_is_a_flag(
        self, command: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main([command, "--help"]) == 0
        text = capsys.readouterr().out
        for option in fields(EngineOptions):
            assert "--" + option.name.replace("_", "-") in text

    def test_needs_no_torch(self) -> None:
        code = "import sys; from prefixkv.cli import main; main(['serve', '--help']); " + (
            "sys.exit('torch' in sys.modules)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
        assert done.returncode == 0

    def test_version(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["--version"]) == 0
        assert capsys.readouterr().out == f"prefixkv {__version__}\n"


class TestMistakes:
    @pytest.mark.parametrize(
        ("args", "named"),
        [
            (["generate", "x", "--model", "/no/such/model"], "/no/such/model"),
            (["serve", "--host", "no.such.host.invalid"], "--host"),
            (["generate", "x", "--device", "gadget"], "--device is 'gadget'"),
            (["serve", "--reserve", "/no/such/file"], "/no/such/file"),
            (["serve", "--admin-key-file", "/no/such/key"], "--admin-key-file /no/such/key"),
        ],
    )
    def test_an_error_is_one_line(
        self, args: list[str], named: str, capfd: pytest.CaptureFixture[str]
    ) -> None:
        assert main(args) == 1
        self._check_one_line(capfd, named)

    @pytest.mark.parametrize(
        ("args", "named"),
        [
            (["nonsense"], "nonsense"),
            (["generate", "--nonsense"], "--nonsense"),
            (["generate", "x", "--dtype", "int3"], "--dtype"),
            (["generate", "x", "--num-blocks", "few"], "--num-blocks"),
            (["generate", "one", "two"], "two"),
            (["generate", "x", "--num-blocks", "0"], "--num-blocks is 0"),
            (
                ["generate", "x", "--block-size", "5000"],
                "--block-size is 5000; it must be a whole number, from 1 to 1024",
            ),
            (["generate", "x", "--kv-cache-memory", "much"], "--kv-cache-memory is 'much'"),
            (
                ["chat", "--num-blocks", "5", "--kv-cache-memory", "1GB"],
                "--num-blocks and --kv-cache-memory both",
            ),
            (["generate", "x", "--temperature", "3"], "--temperature is 3.0"),
            (["serve", "--port", "70000"], "--port is 70000"),
            (["chat", "--max-tokens", "0"], "--max-tokens is 0"),
        ],
    )
    def test_misuse_of_a_flag_is_one_line_that_names_it(
        self, args: list[str], named: str, capfd: pytest.CaptureFixture[str]
    ) -> None:
        assert main(args) == 2
        err = self._check_one_line(capfd, named)
        assert err.endswith(" --help)\n")

    @staticmethod
    def _check_one_line(capfd: pytest.CaptureFixture[str], named: str) -> str:
        out, err = capfd.readouterr()
        assert out == ""
        assert err.startswith("error: ")
        assert named in err
        assert err.count("\n") == 1
        return err

    def test_a_missing_extra_is_named(self) -> None:
        code = (
            "import sys; sys.modules['click'] = None; "
            "from prefixkv.cli import main; sys.exit(main([]))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False
        )
        assert done.returncode == 1
        assert "pip install '.[engine]' in a checkout, or 'prefixkv[engine]'" in done.stderr
        assert done.stderr.count("\n") == 1

    def test_a_missing_extra_is_named_to_a_program_too(self) -> None:
        code = (
            "import sys; sys.modules['torch'] = None\n"
            "try: from prefixkv import LLM\n"
            "except ImportError as error: print(error, '|', error.__cause__.name)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False
        )
        assert done.stdout.strip() == (
            "LLM needs torch and more: pip install '.[engine]' in a checkout, or "
            "'prefixkv[engine]' | torch"
        )


class TestGenerate:
    def test_prints_the_text(self, model: Path) -> None:
        done = run("generate", PROMPT, "--max-tokens", "8", "--model", str(model), *SMALL)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()

    def test_says_nothing_but_the_text(self, model: Path) -> None:
        done = run("generate", PROMPT, "--max-tokens", "1", "--model", str(model), *SMALL)
        assert done.stderr == ""

    def test_reads_the_prompt_from_stdin(self, model: Path) -> None:
        flags = ("--max-tokens", "8", "--model", str(model), *SMALL)
        given = run("generate", PROMPT, *flags)
        read = run("generate", "-", *flags, text=PROMPT)
        assert read.stdout == given.stdout

    def test_verbose_counts_on_stderr(self, model: Path) -> None:
        done = run("generate", PROMPT, "-v", "--max-tokens", "4", "--model", str(model), *SMALL)
        last = done.stderr.splitlines()[-1]
        assert all(word in last for word in ("prompt", "cached 0", "computed", "first token"))

    def test_a_prompt_that_does_not_fit(self, model: Path) -> None:
        done = run("generate", PROMPT * 50, "--max-model-len", "64", "--model", str(model), *SMALL)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.splitlines()[-1].startswith("error: ")
        assert "Traceback" not in done.stderr

    def test_ctrl_c_ends_it_without_a_traceback(self, model: Path) -> None:
        args = ("generate", PROMPT, "--model", str(model), *SMALL, *ENDLESS)
        with started(*args) as process:
            assert process.stdout is not None
            assert process.stdout.read(1)
            code, errors = signalled(process, signal.SIGINT)
        assert code == 130
        assert "Traceback" not in errors


class TestChat:
    def test_a_turn_reuses_the_turns_before(self, model: Path) -> None:
        turns = f"{PROMPT}\nAnd then?\n/exit\nnever read\n"
        done = run("chat", "--max-tokens", "8", "--model", str(model), *SMALL, text=turns)
        assert done.returncode == 0, done.stderr
        counts = [line for line in done.stderr.splitlines() if line.startswith("prompt ")]
        cached = [int(line.split()[4]) for line in counts]
        assert cached[0] == 0
        assert cached[1] > 0
        assert len(cached) == 2

    def test_ctrl_c_stops_an_answer_and_the_chat_goes_on(self, model: Path) -> None:
        with started("chat", "--model", str(model), *SMALL, *ENDLESS) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(f"{PROMPT}\n")
            process.stdin.flush()
            assert process.stdout.read(1)
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate("/exit\n", timeout=TIMEOUT)
        assert process.returncode == 0, errors
        assert "stopped" in errors

    def test_reset_forgets(self, model: Path) -> None:
        turns = f"{PROMPT}\n/reset\n{PROMPT}\n"
        done = run("chat", "--max-tokens", "8", "--model", str(model), *SMALL, text=turns)
        counts = [
            line.split()[1] for line in done.stderr.splitlines() if line.startswith("prompt ")
        ]
        assert len(counts) == 2
        assert counts[0] == counts[1]

    def test_a_conversation_that_does_not_fit_goes_on(self, model: Path) -> None:
        turns = f"{PROMPT * 50}\nhello\n"
        limits = ("--max-tokens", "8", "--max-model-len", "256")
        done = run("chat", *limits, "--model", str(model), *SMALL, text=turns)
        assert done.returncode == 0, done.stderr
        assert "error: " in done.stderr
        assert sum(line.startswith("prompt ") for line in done.stderr.splitlines()) == 1


class TestServe:
    def test_serves_under_its_names(self, model: Path) -> None:
        names = ("--served-model-name", "mine", "--served-model-name", "too")
        with (
            serving(model, *names) as (_, url),
            OpenAI(base_url=f"{url}/v1", api_key="none") as client,
        ):
            assert [served.id for served in client.models.list()] == ["mine", "too"]
            assert client.completions.create(model="too", prompt=PROMPT).model == "too"

    def test_reserves_files_before_it_is_ready(self, model: Path, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text(PROMPT * 2)
        (tmp_path / "b.jsonl").write_text(f'"{PROMPT[::-1]}"\n"{PROMPT.upper()}"\n')
        files = [f"--reserve={tmp_path / name}" for name in ("a.txt", "b.jsonl")]
        limits = ("--max-model-len", "256", "--prefix-cache", "paged")
        with (
            serving(model, *limits, *files) as (_, url),
            OpenAI(base_url=f"{url}/v1", api_key="none") as client,
        ):
            (served,) = client.models.list()
            for prompt in (PROMPT * 2, PROMPT[::-1], PROMPT.upper()):
                usage = client.completions.create(model=served.id, prompt=f"{prompt} And").usage
                assert usage is not None
                assert usage.prompt_tokens_details is not None
                own = usage.prompt_tokens - (usage.prompt_tokens_details.cached_tokens or 0)
                assert own <= len(" And") + 1

    def test_a_file_that_is_called_like_an_option_keeps_its_name(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "max_model_len.txt"
        path.touch()
        assert main(["serve", "--reserve", str(path)]) == 1
        assert f"cannot reserve {path}: it is empty" in capsys.readouterr().err

    def test_what_cannot_be_reserved_ends_it_in_one_line(self, model: Path, tmp_path: Path) -> None:
        (tmp_path / "long.jsonl").write_text(f'"{PROMPT}"\n"{PROMPT * 40}"\n')
        port = ("--port", "0", "--max-model-len", "256")
        done = run(
            *("serve", "--model", str(model), *port, *SMALL),
            *("--reserve", str(tmp_path / "long.jsonl")),
        )
        assert done.returncode == 1
        *reserved, error = done.stderr.strip().splitlines()
        assert [line.partition(":")[0] for line in reserved] == [
            f"reserved {tmp_path / 'long.jsonl'}, line 1"
        ]
        assert error.startswith(f"error: cannot reserve {tmp_path / 'long.jsonl'}, line 2: ")

    def test_sigterm_ends_it_well(self, model: Path) -> None:
        with serving(model) as (process, _):
            assert signalled(process, signal.SIGTERM) == (0, "")

    def test_ctrl_c_ends_it_without_a_traceback(self, model: Path) -> None:
        with serving(model) as (process, _):
            assert signalled(process, signal.SIGINT) == (130, "")

    def test_a_second_signal_does_not_wait_for_a_client_that_is_still_sending(
        self, model: Path
    ) -> None:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\n"
        with serving(model, "--shutdown-timeout", "3600") as (process, url):
            host, port = url.removeprefix("http://").split(":")
            with socket.create_connection((host, int(port))) as client:
                client.sendall(head + b"Content-Length: 900000\r\n\r\n{")
                httpx.get(f"{url}/health").raise_for_status()  # it has read that much
                process.send_signal(signal.SIGTERM)
                assert process.stderr is not None
                assert "stopping" in process.stderr.readline()
                code, _ = signalled(process, signal.SIGTERM)
        assert code == 0

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_says_what_it_waits_for(self, model: Path, number: signal.Signals) -> None:
        body = {"prompt": PROMPT, "max_tokens": 1500, "ignore_eos": True, "stream": True, "n": 16}
        with (
            serving(model, "--num-blocks", "2000") as (process, url),
            httpx.stream("POST", f"{url}/v1/completions", json=body) as answer,
        ):
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(number)
            assert process.stderr is not None
            told = process.stderr.readline()
            assert told == "stopping: 1 request gets up to 30 s; Ctrl-C again ends it\n"

    def test_what_runs_is_told_when_time_is_up(self, model: Path) -> None:
        body = {"prompt": PROMPT, "max_tokens": 900, "ignore_eos": True, "stream": True}
        with serving(model, "--shutdown-timeout", "0") as (process, url):
            with httpx.stream("POST", f"{url}/v1/completions", json=body) as answer:
                lines = answer.iter_lines()
                next(lines)
                process.send_signal(signal.SIGTERM)
                *_, error, done = (line for line in lines if line)
            assert "server_error" in error
            assert done == "data: [DONE]"
            assert process.wait(TIMEOUT) == 0

    def test_a_port_in_use_is_told_before_the_model_loads(self, model: Path) -> None:
        with serving(model) as (_, url):
            port = url.rpartition(":")[2]
            done = run("serve", "--port", port, "--model", "/no/such/model")
        assert done.returncode == 1
        assert done.stderr.startswith(f"error: cannot listen on 127.0.0.1:{port}")
        assert done.stderr.count("\n") == 1
