"""The reference engine: one transformers model, behind a front or in the trainer's own process."""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from weightlane.agents import agent_of
from weightlane.errors import EngineError, NotServableError, SyncTimeoutError
from weightlane.facts import EngineFacts
from weightlane.front.desk import FrontDesk
from weightlane.reference.adapters import AdapterShelf
from weightlane.reference.generation import generate_tokens
from weightlane.reference.sleep import TAGS, SleepingMemory
from weightlane.reference.worker import ReferenceWorker

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from weightlane.adapter_engine import AdapterLoad
    from weightlane.adapters import AdapterBinding
    from weightlane.messages import Generate, Generations

_FENCE_WAIT_SECONDS = 60.0

ComputeDtype = Literal["auto", "float32", "bfloat16", "float16"]

SLOTS = "adapter-slots"
"""The launch argument that bounds how many adapters are held; absent from the facts where nothing does."""


class ReferenceEngine:
    """A causal language model from a folder, with generation, log-probs and a weight version.

    Implements `FrontEngine`; its `worker` implements `WorkerEngine`. One generation runs at a time.

    Args:
        model_path: a Hugging Face checkpoint folder. Nothing is downloaded, no code from it is run.
        dtype: what the model computes in and holds; "auto" keeps the checkpoint's. The default is float32,
            so that log-probs can be compared.
        device: a torch device.
        adapter_slots: how many adapters it holds at once; 0 sets no limit. A lane with swap `two_slot` needs
            two for its adapter, one with `paused` one.

    Raises:
        EngineError: the folder cannot be loaded, or its model holds fused experts.
    """

    def __init__(
        self,
        model_path: str,
        *,
        dtype: ComputeDtype = "float32",
        device: str = "cpu",
        adapter_slots: int = 0,
    ) -> None:
        self.model_path = str(Path(model_path).resolve())
        self.model = load_model(self.model_path, dtype).to(device).eval()
        # Syncs and sleep wait for it with a timeout. A generation waits for the one before it, bounded by
        # that one's own length (max_tokens); its caller's bound is the endpoint's.
        self._busy = threading.Lock()
        self._version: int | None = None
        self._writing: int | None = None
        self.memory = SleepingMemory()
        self.worker = ReferenceWorker(self)
        self.adapter_slots = adapter_slots
        self._adapters = AdapterShelf(self.model, self.worker.live_names, slots=adapter_slots)
        self.desk = FrontDesk(self, origin=f"reference engine (process {os.getpid()})")

    @property
    def version(self) -> int | None:
        """The published weight version; None while the weights are the folder's."""
        return self._version

    @property
    def servable(self) -> bool:
        """False from the first write of a sync until a sync is published."""
        return self._writing is None

    def facts(self) -> EngineFacts:
        """This engine as it is."""
        import transformers

        return EngineFacts(
            engine="reference",
            version=transformers.__version__,
            source="worker",
            model_path=self.model_path,
            device=str(self.model.device),
            launch_arguments={SLOTS: str(self.adapter_slots)} if self.adapter_slots else {},
        )

    def call_workers(self, message: bytes, timeout_seconds: float) -> list[bytes]:
        """The one worker is this engine; its agent bounds its own waits."""
        del timeout_seconds
        return [agent_of(self).handle(message)]

    def call(self, route: str, timeout_seconds: float) -> str:
        """`release_<tag>` and `resume_<tag>`; waits `timeout_seconds` at most for a running generation."""
        action, _, tag = route.partition("_")
        if action == "release":
            self.sleep((tag,), timeout_seconds=timeout_seconds)
        elif action == "resume":
            self.wake((tag,), timeout_seconds=timeout_seconds)
        else:
            raise EngineError(
                f"The reference engine has no call {route!r}.",
                f"It has release_ and resume_ of {', '.join(TAGS)}.",
                "Leave it out of the plan.",
            )
        return f"released: {', '.join(self.memory.released) or 'nothing'}"

    def generate(self, request: Generate) -> Generations:
        """Continuations with log-probs; see `generate_tokens`.

        A request that names no adapter is answered with the base, where no adapter is held; the version is
        that of the adapter named.

        Raises:
            NotServableError: a sync has begun and is not published, or has failed.
            EngineError: the request names an adapter that is not served, or none while adapters are.
        """
        with self._busy:
            self.memory.require_awake()
            if self._writing is not None:
                raise NotServableError(
                    "The reference engine refuses to generate.",
                    f"Its weights are being written, or were half-written, by a sync to version "
                    f"{self._writing}.",
                    "Sync until a sync is published.",
                )
            with self._adapters.applied(request.adapter) as adapter:
                version = adapter.version if adapter else self._version
                return generate_tokens(self.model, request, version=version)

    def shutdown(self) -> None:
        """Nothing outlives the process."""

    def sleep(self, tags: Sequence[str] = TAGS, *, timeout_seconds: float = _FENCE_WAIT_SECONDS) -> None:
        """Lets go of `tags` (`weights`, `kv_cache`) and refuses to generate until all are taken back.

        Released weights are gone: their memory is freed, and after `wake` a full sync has to write them.

        Raises:
            SyncTimeoutError: a generation still ran after `timeout_seconds`; nothing was released.
            EngineError: an unknown tag, or one that is released already.
        """
        with self.between_generations(f"release of {', '.join(tags)}", timeout_seconds):
            self.memory.release(tags, self.worker.synced_tensors())

    def wake(self, tags: Sequence[str] = TAGS, *, timeout_seconds: float = _FENCE_WAIT_SECONDS) -> None:
        """Takes `tags` back, which must be released. Weights come back as memory only, not as values.

        Raises:
            EngineError: an unknown tag, or one that is not released.
        """
        with self.between_generations(f"resume of {', '.join(tags)}", timeout_seconds):
            self.memory.resume(tags)

    def fence(self, version: int) -> None:
        """Refuses generation until `unfence`, after the running one has ended.

        Raises:
            SyncTimeoutError: a generation still ran after a minute; nothing was fenced.
        """
        with self.between_generations(f"Version {version}"):
            self._writing = version

    def unfence(self, version: int) -> None:
        """Generates again, and stamps `version`."""
        with self._busy:
            self._version, self._writing = version, None

    def load_adapter(self, load: AdapterLoad) -> AdapterBinding:
        """Holds an adapter beside what serves; see `AdapterShelf.load`."""
        with self.between_generations(f"Adapter {load.ref.name}"):
            return self._adapters.load(load)

    def serve_adapter(self, slot: str) -> None:
        """Generates with this adapter from the next request on, and stamps its version."""
        with self.between_generations(f"Adapter slot {slot}"):
            self._version = self._adapters.serve(slot).version

    def remove_adapter(self, slot: str) -> None:
        """Frees an adapter slot."""
        with self.between_generations(f"Adapter slot {slot}"):
            self._adapters.remove(slot)

    @contextmanager
    def between_generations(self, what: str, seconds: float | None = None) -> Iterator[None]:
        """Runs the block while nothing is generated; `what` waits, for messages, a minute if not told.

        Raises:
            SyncTimeoutError: a generation still ran then.
        """
        seconds = _FENCE_WAIT_SECONDS if seconds is None else seconds
        if not self._busy.acquire(timeout=seconds):
            raise SyncTimeoutError(
                f"{what} waited {seconds:g} s for a running generation.",
                "Weights are not written or released while the engine generates.",
                "Sync between generations.",
            )
        try:
            yield
        finally:
            self._busy.release()


def load_model(folder: str, dtype: ComputeDtype) -> Any:
    """The model in `folder`, in `dtype`, on CPU.

    Raises:
        EngineError: transformers cannot load it.
    """
    if not (Path(folder) / "config.json").is_file():  # told before seconds are spent on imports
        raise EngineError(
            f"The reference engine cannot load {folder}: it has no config.json.",
            fix="Give the folder of a Hugging Face checkpoint.",
        )
    import torch
    from packaging.version import Version

    try:
        import transformers
    except ImportError as error:
        raise EngineError(
            f"The reference engine needs transformers: {error}.",
            fix='Install it: pip install "weightlane[reference]"',
        ) from error
    # Renamed in 4.56; the old name warns since, and the new one was ignored before.
    keyword = "dtype" if Version(transformers.__version__) >= Version("4.56") else "torch_dtype"
    wanted = dtype if dtype == "auto" else getattr(torch, dtype)
    try:
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, **{keyword: wanted}
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise EngineError(
            f"The reference engine cannot load {folder}: {error}.",
            "The folder must hold a whole Hugging Face checkpoint of a causal language model.",
            "Check its config.json and its safetensors files.",
        ) from error
