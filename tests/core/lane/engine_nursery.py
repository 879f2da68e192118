"""Forks reference engines from one process that has imported transformers: a start costs a moment, not 8 s.

Reads one JSON object a line (`model`, `address`, `log`), answers with the process id of the engine. Each
engine is a process of its own, leader of its own session. Ends with all of them when its input ends.
"""

import json
import os
import signal
import sys

from transformers import LlamaForCausalLM  # noqa: F401 - imported here so that no engine has to

from weightlane.reference import engine, server  # noqa: F401


def become_engine(order: dict[str, str]) -> None:
    os.setsid()
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os._exit(server.main(["--model", order["model"], "--address", order["address"], "--threads", "1"]))


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody has to wait for the dead
    started: list[int] = []
    try:
        for line in sys.stdin:
            order = json.loads(line)
            child = os.fork()
            if child == 0:
                become_engine(order)
            started.append(child)
            print(child, flush=True)
    finally:
        for child in started:
            try:
                os.kill(child, signal.SIGKILL)
            except ProcessLookupError:
                continue


if __name__ == "__main__":
    main()
