"""Finds the calls in a source that can block for ever, as far as the source alone tells."""

from __future__ import annotations

import ast
import io
import tokenize
from typing import NamedTuple

NOTE = "bounded by"
LINES_ABOVE = 4
WAITS_FOR_GIVEN = {"asyncio", "futures", "connection", ""}
"""Owners whose `wait` takes what to wait for; any other `wait` takes its bound first."""
BOUND_FIRST = {"join", "wait", "result", "exception", "select"}
BOUND_SECOND = {"wait_for", "communicate", "as_completed", "urlopen"}
FLAG_FIRST = {"acquire", "get"}
"""Their first argument may say whether to block at all; `get` of a mapping has a key there."""
RUNS = {"run", "call", "check_output", "check_call"}
CONNECTIONS = {"create_connection", "HTTPConnection", "HTTPSConnection"}
SOCKET_CALLS = {"recv", "recv_into", "recvfrom", "recvmsg", "accept"}
LOCKS = {"Lock", "RLock", "Condition", "Semaphore", "BoundedSemaphore"}
LOCK_MODULES = {"threading", "multiprocessing", "asyncio"}
SYSTEM_CALLS = {("os", "wait"), ("os", "waitpid"), ("os", "read"), ("fcntl", "flock"), ("signal", "sigwait")}
POOLS = {"ThreadPoolExecutor", "ProcessPoolExecutor"}
COLLECTIVES = {"broadcast", "all_reduce", "all_gather", "barrier", "new_group", "TCPStore"}
COLLECTIVES_OF_DIST = COLLECTIVES | {
    "all_gather_into_tensor",
    "all_gather_object",
    "all_to_all",
    "broadcast_object_list",
    "gather",
    "init_process_group",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "send",
}


class Blocking(NamedTuple):
    """One call, with the lines that it takes."""

    line: int
    last_line: int
    name: str


def without_note(source: str) -> list[Blocking]:
    """Blocking calls with neither a bound of their own nor a comment beside them of what bounds them."""
    noted = {
        token.start[0]
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT and NOTE in token.string.lower()
    }
    return [
        call
        for call in blocking_calls(ast.parse(source))
        if noted.isdisjoint(range(call.line - LINES_ABOVE, call.last_line + 1))
    ]


def blocking_calls(tree: ast.AST) -> list[Blocking]:
    """Every call that has no bound in itself, in the order of the source."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    locks = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module in LOCK_MODULES
        for alias in node.names
        if alias.name in LOCKS
    }
    sets_timeouts = any(
        _name(call) in {"settimeout", "setdefaulttimeout"} and any(map(_is_bound, call.args))
        for call in calls
    )
    found = [
        Blocking(call.lineno, call.end_lineno or call.lineno, _full_name(call))
        for call in calls
        if _name(call) in locks or _may_block(call, sets_timeouts=sets_timeouts)
    ]
    return sorted(found)


def _may_block(call: ast.Call, *, sets_timeouts: bool) -> bool:
    name, owner = _name(call), _owner(call)
    if (owner, name) in SYSTEM_CALLS:
        return not {"WNOHANG", "LOCK_NB", "LOCK_UN"} & set(_names_in(call))
    if name in LOCKS:
        return owner in LOCK_MODULES
    if name in POOLS:  # leaving one waits for whatever runs in it
        return True
    if name in COLLECTIVES or (owner in {"dist", "distributed"} and name in COLLECTIVES_OF_DIST):
        return not _has_keyword_bound(call)
    if owner == "subprocess" and name in RUNS:
        return not _has_keyword_bound(call)
    if name in CONNECTIONS:
        return not _has_keyword_bound(call) and not any(map(_is_bound, call.args[1:]))
    if name in SOCKET_CALLS and isinstance(call.func, ast.Attribute):
        return not sets_timeouts or name == "accept"
    return _waits_without_bound(call, name, owner)


def _waits_without_bound(call: ast.Call, name: str, owner: str) -> bool:
    if _has_keyword_bound(call) or _does_not_block(call):
        return False
    bare = isinstance(call.func, ast.Name)
    if owner == "select" and name == "select":
        bounds = call.args[3:]
    elif name == "wait" and owner in WAITS_FOR_GIVEN and (owner or bare):
        bounds = [] if owner == "asyncio" else call.args[1:]
    elif name in BOUND_SECOND:
        bounds = call.args[1:]
    elif not bare and (name in BOUND_FIRST or name in FLAG_FIRST):
        bounds = call.args
    else:
        return False
    return not any(map(_is_bound, bounds))


def _does_not_block(call: ast.Call) -> bool:
    """`acquire(blocking=False)`, `get(block=False)` or `acquire(False)`."""
    flags = [item.value for item in call.keywords if item.arg in {"blocking", "block"}] + call.args[:1]
    return any(isinstance(flag, ast.Constant) and flag.value is False for flag in flags)


def _has_keyword_bound(call: ast.Call) -> bool:
    return any(
        keyword.arg in {"timeout", "seconds", "timeout_seconds"} and _is_bound(keyword.value)
        for keyword in call.keywords
    )


def _is_bound(value: ast.expr) -> bool:
    """Whatever is not known to be none: `None`, `True` and negative numbers are."""
    if isinstance(value, ast.UnaryOp) and isinstance(value.op, ast.USub):
        return False
    return not (isinstance(value, ast.Constant) and (value.value is None or value.value is True))


def _names_in(call: ast.Call) -> list[str]:
    return [node.attr for node in ast.walk(call) if isinstance(node, ast.Attribute)]


def _name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _owner(call: ast.Call) -> str:
    """The last name before the call's own: `futures` in `concurrent.futures.wait`; "" where there is none."""
    value = call.func.value if isinstance(call.func, ast.Attribute) else None
    if isinstance(value, ast.Attribute):
        return value.attr
    return value.id if isinstance(value, ast.Name) else ""


def _full_name(call: ast.Call) -> str:
    owner = _owner(call)
    return f"{owner}.{_name(call)}" if owner else _name(call)
