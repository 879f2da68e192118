"""What the reference engine lets go of while it sleeps, and takes back when it wakes, by tag."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weightlane.errors import EngineError, NotServableError, near_names

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

TAGS = ("weights", "kv_cache")
"""`weights`: the memory of every tensor that a full sync writes, contents and all. `kv_cache`: the right to
make a key-value cache; this engine holds one only while it generates, so that tag frees nothing by itself and
is there because schedules name it."""


class SleepingMemory:
    """Released tags and what it takes to undo them. Not thread-safe: the engine's lock guards it."""

    def __init__(self) -> None:
        self._released: dict[str, list[tuple[Any, int]]] = {}
        self.why_lost = ""
        """Why the weights are no version at all; "" while they are one."""

    @property
    def released(self) -> tuple[str, ...]:
        """Tags let go and not taken back."""
        return tuple(tag for tag in TAGS if tag in self._released)

    def release(self, tags: Sequence[str], weights: Iterable[Any]) -> None:
        """Lets go of `tags`; `weights` are the live tensors that a full sync writes.

        Raises:
            EngineError: an unknown tag, or one that is released already; nothing was released then.
        """
        self._require(tags, released=False)
        for tag in tags:
            self._released[tag] = _freed(weights) if tag == "weights" else []
            if tag == "weights":
                self.why_lost = "They were released while it slept, and no full sync has written them since."

    def resume(self, tags: Sequence[str]) -> None:
        """Takes `tags` back, as memory: what the weights were is lost until a full sync has written them.

        Raises:
            EngineError: an unknown tag, or one that is not released; nothing was resumed then.
        """
        self._require(tags, released=True)
        for tag in tags:
            _taken_back(self._released.pop(tag))

    def rewritten(self) -> None:
        """Every tensor that `weights` stands for was written again."""
        self.why_lost = ""

    def require_awake(self) -> None:
        """Raises NotServableError while anything is released or the weights are lost."""
        if self._released:
            raise NotServableError(
                "The reference engine sleeps and does not generate.",
                f"It has released {', '.join(self.released)}.",
                f"Wake it (tags {', '.join(self.released)}), or sync a lane that manages them.",
            )
        if self.why_lost:
            raise NotServableError(
                "The reference engine is awake and has no weights.",
                self.why_lost,
                "Run a full sync.",
            )

    def _require(self, tags: Sequence[str], *, released: bool) -> None:
        for tag in tags:
            if tag not in TAGS:
                near = ", ".join(near_names(tag, TAGS))
                raise EngineError(
                    f"The reference engine has no memory of tag {tag!r}.",
                    f"It has {', '.join(TAGS)}.",
                    f"Use {near}." if near else "",
                )
            if (tag in self._released) is not released:
                raise EngineError(
                    f"{tag} cannot be {'resumed' if released else 'released'}: it is "
                    f"{'not released' if released else 'released already'}.",
                    "Only what was released is resumed, once.",
                    "Let one side alone, the lane or its user, put this engine to sleep.",
                )


def _freed(weights: Iterable[Any]) -> list[tuple[Any, int]]:
    """Frees each tensor's storage and keeps its shape; gives what it takes to undo that."""
    import torch

    undo: list[tuple[Any, int]] = []
    for tensor in weights:
        nbytes = tensor.untyped_storage().nbytes()
        if nbytes == 0:
            continue  # shares the storage of one before it
        if not tensor.untyped_storage().resizable():  # a mapped file
            tensor.data = torch.empty_like(tensor)
            nbytes = tensor.untyped_storage().nbytes()
        tensor.untyped_storage().resize_(0)
        undo.append((tensor, nbytes))
    return undo


def _taken_back(undo: Iterable[tuple[Any, int]]) -> None:
    import torch

    for tensor, nbytes in undo:
        tensor.untyped_storage().resize_(nbytes)
        if tensor.is_floating_point():
            with torch.no_grad():
                tensor.fill_(float("nan"))  # whoever used them before a sync would see it at once
