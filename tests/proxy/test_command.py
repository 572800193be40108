"""``kvxfer proxy`` as a person runs it: a process, its lines, its exit code."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.helpers import free_port
from tests.proxy.fakes import Answer, FakeEngine, give_params, give_text

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 120
ENV = {
    **{key: value for key, value in os.environ.items() if not key.startswith("KVXFER_")},
    "PYTHONPATH": str(ROOT),
    "COLUMNS": "200",
}
WITHOUT_AIOHTTP = (
    "import sys; sys.modules['aiohttp'] = None\n"
    "from kvxfer.cli.app import main\nsys.argv[0] = 'kvxfer'\nmain()\n"
)


def kvxfer(*arguments: str, code: str | None = None) -> subprocess.CompletedProcess[str]:
    start = ["-m", "kvxfer"] if code is None else ["-c", code]
    return subprocess.run(
        [sys.executable, *start, "proxy", *arguments],
        env=ENV,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


@contextmanager
def engine(name: str, answer: Answer) -> Iterator[FakeEngine]:
    """A fake in a thread of its own."""
    fake = FakeEngine(name, answer)
    is_up = threading.Event()
    loop = asyncio.new_event_loop()
    end = asyncio.Event()

    async def serve() -> None:
        async with fake.running():
            is_up.set()
            await end.wait()

    def work() -> None:
        loop.run_until_complete(serve())
        loop.close()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert is_up.wait(TIMEOUT_S)
        yield fake
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join(TIMEOUT_S)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_two_engines_and_the_command(number: signal.Signals) -> None:
    with (
        engine("p", give_params) as p,
        engine("d", give_text) as d,
        subprocess.Popen(
            [
                *(sys.executable, "-m", "kvxfer", "proxy", "--prefill", p.url, "--decode", d.url),
                *("--listen", "127.0.0.1:0"),
            ],
            env=ENV,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        assert process.stderr is not None
        try:
            lines = [process.stderr.readline() for _ in range(3)]
            assert sorted(lines[:2]) == [
                f"kvxfer: decode {d.url} is up\n",
                f"kvxfer: prefill {p.url} is up\n",
            ]
            found = re.fullmatch(
                rf"kvxfer: proxy listens at (http://127\.0\.0\.1:\d+); prefill: {p.url}; "
                rf"decode: {d.url}\n",
                lines[2],
            )
            assert found, lines[2]
            asked = urllib.request.Request(
                found[1] + "/v1/completions", data=b'{"prompt":"p"}', method="POST"
            )
            with urllib.request.urlopen(asked, timeout=TIMEOUT_S) as reply:
                assert reply.read() == b'{"choices": [{"text": "hello"}]}'
            process.send_signal(number)
            out, err = process.communicate(timeout=TIMEOUT_S)
        finally:
            if process.poll() is None:
                process.kill()
    assert (out, err) == ("", f"kvxfer: ended by {number.name}\n")
    assert process.returncode == 128 + number
    assert [call.path for call in p.calls + d.calls] == ["/v1/completions"] * 2


SIDES = ("--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:1")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--prefill", "here", *SIDES[2:]), "--prefill: expected http://HOST:PORT, got 'here'"),
        ((*SIDES, "--listen", "8000"), "--listen: expected HOST:PORT, got '8000'"),
        ((*SIDES, "--log-level", "LOUD"), "--log-level: expected one of DEBUG"),
    ],
)
def test_errors_are_one_line(arguments: tuple[str, ...], sentence: str) -> None:
    ran = kvxfer(*arguments)
    assert ran.returncode == 2
    assert ran.stderr.startswith(f"kvxfer: error: {sentence}")
    assert ran.stderr.count("\n") == 1


def test_a_port_in_use_is_an_error_to_act_on() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        at = f"127.0.0.1:{taken.getsockname()[1]}"
        ran = kvxfer(
            *("--prefill", f"http://127.0.0.1:{free_port()}", *SIDES[2:], "--listen", at),
            *("--log-level", "ERROR"),
        )
    assert ran.returncode == 2
    assert ran.stderr == (
        f"kvxfer: error: --listen: {at} is in use; end what listens there, or choose another port\n"
    )


def test_without_the_extra() -> None:
    ran = kvxfer(*SIDES, code=WITHOUT_AIOHTTP)
    assert ran.returncode == 2
    assert ran.stderr == (
        "kvxfer: error: kvxfer proxy: needs aiohttp, which is not installed; "
        "pip install 'aiohttp>=3.12' 'prometheus-client>=0.20'\n"
    )


def test_help_needs_no_http_library() -> None:
    ran = kvxfer("--help", code=WITHOUT_AIOHTTP)
    assert ran.returncode == 0, ran.stderr
    assert "--on-missing-kv" in ran.stdout
