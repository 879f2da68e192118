"""A command whose output goes into a pipe that nobody reads ends quietly."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

COMMAND = "import sys; from weightlane.cli import main; sys.exit(main())"


def ended_without_reader(code: str, *words: str) -> tuple[int, str]:
    """Exit status and standard error of a process whose standard output is a broken pipe."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, *words],
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        os.close(writing)
    return done.returncode, done.stderr


@pytest.mark.parametrize("words", [("backends",), ("doctor", "--json")], ids=" ".join)
def test_it_says_nothing_and_exits_as_if_a_signal_had_ended_it(words: tuple[str, ...]) -> None:
    assert ended_without_reader(COMMAND, *words) == (141, "")


def test_rich_and_a_pipe_that_is_not_the_output_are_told_apart() -> None:
    # rich puts another file in the place of standard output and exits with 1.
    with_rich = "import weightlane.cli as c; from rich.console import Console; "
    with_rich += "c._dispatch = lambda *a, **k: Console().print('x'); import sys; sys.exit(c.main(['demo']))"
    assert ended_without_reader(with_rich) == (141, "")
    elsewhere = "import weightlane.cli as c, sys\ndef broken(*a, **k): raise BrokenPipeError('a socket')\n"
    elsewhere += "c._dispatch = broken; sys.exit(c.main(['demo']))"
    done = subprocess.run(
        [sys.executable, "-c", elsewhere], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "BrokenPipeError: a socket" in done.stderr


def test_a_reader_that_stays_gets_everything_and_the_command_s_own_status() -> None:
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, "backends"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("BACKEND")
