"""Every call of ours that can block has a bound of its own, or a comment beside it of what bounds it."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from blocking_calls import without_note

import weightlane

CORE = Path(weightlane.__file__).parent
PLUGINS = Path(__file__).parents[3] / "plugins"
SOURCES = [*sorted(CORE.rglob("*.py")), *sorted(PLUGINS.glob("*/src/**/*.py"))]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: "/".join(path.parts[-2:]))
def test_a_wait_is_bounded_or_says_by_what(path: Path) -> None:
    assert without_note(path.read_text()) == []


def test_every_part_of_the_code_is_looked_at() -> None:
    folders = {part for path in SOURCES for part in path.parts}
    assert {"cli", "demo", "testing", "weightlane_vllm", "weightlane_sglang"} <= folders
    assert {"weightlane_fsdp", "weightlane_megatron"} <= folders


BLOCKING = """
    thread.join()
    thread.join(None)
    thread.join(timeout=None)
    event.wait()
    self.event.wait(None)
    lock.acquire()
    lock.acquire(True)
    lock.acquire(True, -1)
    lock.acquire(timeout=-1)
    jobs.get()
    jobs.get(True)
    jobs.get(block=True)
    jobs.get(True, None)
    future.result()
    future.result(None)
    process.communicate()
    process.communicate(text)
    condition.wait_for(predicate)
    asyncio.wait([task])
    asyncio.wait({task}, return_when=FIRST)
    asyncio.wait_for(task, None)
    wait_for(task, timeout=None)
    futures.wait(calls)
    concurrent.futures.wait(calls)
    wait(calls)
    futures.as_completed(calls)
    connection.wait([pipe], None)
    select.select([pipe], [], [])
    select.select([pipe], [], [], None)
    selector.select()
    self.selector.select(None)
    sock.accept()
    sock.recv(4)
    pipe.recv()
    os.read(descriptor, 4)
    os.waitpid(pid, 0)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    subprocess.run(["true"])
    subprocess.call(["true"], timeout=None)
    urlopen(url)
    socket.create_connection(address)
    HTTPConnection(host)
    dist.broadcast(tensor, src=0)
    dist.barrier()
    torch.distributed.all_gather_object(found, mine)
    dist.init_process_group("gloo")
    guard = threading.Lock()
    guard = multiprocessing.Condition()
    pool = ThreadPoolExecutor(1)
"""


@pytest.mark.parametrize("line", textwrap.dedent(BLOCKING).strip().splitlines())
def test_the_check_sees_every_kind_of_wait(line: str) -> None:
    assert len(without_note(line)) == 1


BOUNDED = """
    text = ", ".join(names)
    path = os.path.join(folder, name)
    event.wait(3.0)
    event.wait(seconds)
    thread.join(timeout=1)
    lock.acquire(timeout=seconds)
    lock.acquire(False)
    lock.acquire(blocking=False)
    value = mapping.get("key")
    value = mapping.get(key, None)
    jobs.get(True, 3.0)
    jobs.get(block=False)
    future.result(seconds)
    process.communicate(text, 3.0)
    condition.wait_for(predicate, seconds)
    await asyncio.wait([task], timeout=3.0)
    await asyncio.wait_for(task, 3.0)
    futures.wait(calls, timeout=3.0)
    wait(calls, 3.0)
    select.select([pipe], [], [], 0.0)
    selector.select(left)
    os.waitpid(pid, os.WNOHANG)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    subprocess.run(["true"], timeout=1)
    socket.create_connection(address, 3.0)
    dist.init_process_group("gloo", timeout=bound)
    sock.settimeout(3.0); sock.recv(4)
    Lock(weightlane="1")
"""


@pytest.mark.parametrize("line", textwrap.dedent(BOUNDED).strip().splitlines())
def test_what_is_bounded_needs_no_note(line: str) -> None:
    source = f"async def function():\n    {line}" if "await" in line else line
    assert without_note(source) == []


def test_a_lock_by_its_bare_name_is_one_where_it_was_imported_as_one() -> None:
    assert len(without_note("from threading import Lock as Guard\nguard = Guard()")) == 1
    assert len(without_note("from threading import Lock\nguard = Lock()")) == 1
    assert len(without_note("from weightlane.lock_file import Lock\nlock = Lock()")) == 0


def test_a_timeout_that_is_taken_off_is_none() -> None:
    assert len(without_note("sock.settimeout(None)\nsock.recv(4)")) == 1


@pytest.mark.parametrize(
    ("source", "noted"),
    [
        ("# Bounded by the thread's own loop.\nthread.join()", True),
        ("thread.join()  # bounded by the thread's own loop", True),
        ("found = select.select(\n    [pipe], [], []  # bounded by the writer\n)", True),
        ("# Bounded by that.\n\n\n\nthread.join()", True),
        ("# Bounded by that, five lines above.\n\n\n\n\nthread.join()", False),
        ("thread.join()\n# bounded by nothing that stands after it", False),
        ("text = 'bounded by the thread'\nthread.join()", False),
        ("'''Bounded by the thread.'''\nthread.join()", False),
        ("raise_unless('# bounded by the thread')\nthread.join()", False),
    ],
)
def test_a_note_is_a_comment_beside_the_call(source: str, noted: bool) -> None:
    assert (without_note(source) == []) is noted
