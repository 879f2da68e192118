"""The program of this era: one `/update_weights_from_tensor` a bucket."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

import msgspec

from weightlane.errors import PlanError, Problem, near_names
from weightlane.program import Program, RequestMove
from weightlane.types import Phase, TransportName
from weightlane_sglang.contract import PAYLOAD_FIELD, UPDATE_REQUEST, UPDATE_ROUTE
from weightlane_sglang.unfit_launch import unfit_launch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from weightlane.contexts import BuildRequestsContext
    from weightlane.facts import EngineFacts

_UPDATE_SECONDS = 120.0
_BASE_NOTE = (
    "the server cannot tell which base it holds: this lane remembers that it sent it, until the server is "
    "started anew or tells a version that this lane did not publish; nobody else may write its weights "
    "without publishing one"
)
_EXPERTS = ".experts."  # in the checkpoint name of every expert's tensor


def build_program(context: BuildRequestsContext) -> Program:
    """The move of one sync.

    The server's own flush is off in every request, the last included: where a request has just ended, SGLang
    asserts on it and the whole server dies. The lifecycle flushes in a request of its own, which can fail.

    Raises:
        PlanError: the server runs in a way whose weights cannot be written by name.
    """
    problems = (*launch_problems(context), *_unwritten_experts(context))
    if problems:
        raise PlanError(problems)
    facts = context.facts
    if context.transport is TransportName.COLLECTIVE:
        from weightlane_sglang.collective_program import announced_move

        move, notes = announced_move(facts)
        return Program(move=move, notes=(*notes, *_beyond_loopback(context)))
    body = json_body(
        facts, UPDATE_REQUEST, {"load_format": None, "flush_cache": False, "abort_all_requests": False}
    )
    require_fields(facts, UPDATE_REQUEST, (PAYLOAD_FIELD,))
    return Program(
        move=RequestMove(
            route=UPDATE_ROUTE,
            payload_field=PAYLOAD_FIELD,
            copies=facts.parallel.tensor,  # each rank reads the entry of its own number, and dies without one
            body=body,
            last_body=body,
            timeout_seconds=_UPDATE_SECONDS,
        ),
        notes=(
            f"buckets travel {facts.parallel.tensor} times, once per tensor-parallel rank, by value",
            "an update tells nothing of what it wrote: names and shapes are checked against the checkpoint",
            *_beyond_loopback(context),
            *((_BASE_NOTE,) if context.phase is Phase.BASE else ()),
        ),
    )


def _beyond_loopback(context: BuildRequestsContext) -> tuple[str, ...]:
    """The URL is the user's word that this host may be sent pickles; which host it is, is still shown."""
    far = sorted({worker.host for worker in context.workers if not is_loopback(worker.host)})
    return tuple(
        f"{host} is not loopback: who can reach the port of SGLang, which unpickles, can run code in it"
        for host in far
    )


def is_loopback(host: str) -> bool:
    """Whether a host of a URL is this machine alone, by its name or its address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def json_body(facts: EngineFacts, request: str, values: Mapping[str, object]) -> str:
    """`values` as a JSON object, after checking that the server's `request` has every one of these fields."""
    require_fields(facts, request, tuple(values))
    return msgspec.json.encode(values).decode()


def require_fields(facts: EngineFacts, request: str, fields: tuple[str, ...]) -> None:
    """Raises PlanError when the server does not list one of `fields`: it would ignore it without a word."""
    found = facts.request_fields.get(request, ())
    missing = [name for name in fields if name not in found]
    if missing:
        raise PlanError(
            [
                Problem(
                    "unknown-field",
                    f"{request}.{name}",
                    f"SGLang {facts.version} does not list it (it lists {', '.join(found) or 'nothing'}), "
                    "and would ignore it",
                    near=near_names(name, found),
                )
                for name in missing
            ]
        )


def launch_problems(context: BuildRequestsContext) -> Iterator[Problem]:
    """Ways in which a server may run and this plugin cannot write into it, whatever the phase."""
    facts = context.facts
    if facts.parallel.data > 1:
        yield Problem(
            "capability",
            "dp_size",
            f"the server runs {facts.parallel.data} data-parallel copies, which this version does not sync",
            "Start one server per copy and name each as a replica.",
        )
    if facts.parallel.pipeline > 1:
        yield Problem(
            "capability", "pp_size", f"pipeline parallelism ({facts.parallel.pipeline}) is not supported yet"
        )
    if facts.quantization:
        yield Problem(
            "capability",
            "quantization",
            f"the server quantizes its weights ({facts.quantization}), and a tensor written over them "
            "by name would not be",
            "Start the server without --quantization.",
        )
    if facts.launch_arguments.get("speculative_algorithm"):
        yield Problem(
            "capability",
            "speculative_algorithm",
            f"the server drafts with {facts.launch_arguments['speculative_algorithm']}, and its drafter "
            "would keep old weights or take these for its own",
            "Start the server without a drafter.",
        )
    if facts.launch_arguments.get("weight_cache_mode", "off") != "off":
        yield Problem(
            "capability",
            "weight_cache_mode",
            "the server shares its weights with a cache and dies of an update",
            "Start it with --weight-cache-mode off.",
        )
    yield from _outside_caches(facts)
    yield from unfit_launch(facts)


def _unwritten_experts(context: BuildRequestsContext) -> Iterator[Problem]:
    """With LoRA on, SGLang wraps the experts and its loader drops their tensors: the request succeeds."""
    if context.facts.launch_arguments.get("enable_lora") != "true":
        return
    experts = [
        tensor.name for worker in context.workers for tensor in worker.expected if _EXPERTS in tensor.name
    ]
    if experts:
        yield Problem(
            "capability",
            "enable_lora",
            f"the model has experts ({experts[0]} and {len(experts) - 1} more tensors), and with LoRA on the "
            "server reports success for expert weights that it did not write",
            "Start the server without --enable-lora and --lora-paths, or use a dense model.",
        )


def _outside_caches(facts: EngineFacts) -> Iterator[Problem]:
    """A flush empties the server's own caches, its host tier among them, and no storage behind them."""
    for argument in ("hicache_storage_backend", "enable_lmcache", "enable_flexkv"):
        value = facts.launch_arguments.get(argument, "false")
        if value == "false":
            continue
        yield Problem(
            "capability",
            argument,
            f"the server keeps keys and values in a store outside of it ({value}), which its flush does not "
            "empty: prefixes computed by the old weights would survive there and be served after a sync",
            f"Start the server without --{argument.replace('_', '-')}.",
        )
