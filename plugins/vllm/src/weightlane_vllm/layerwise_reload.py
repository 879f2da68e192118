"""One load through vLLM's layerwise reload: for layers that the engine has packed away since it loaded them.

The engine puts each layer back in the form in which it loads it, without data; collects what its loaders are
given until the layer is whole; loads that, packs it again, and copies the outcome into the tensors that were
there before. What it does not do is done here: tensors that it keeps are owned (a bucket is valid during one
call alone), a session that ended in the middle leaves nothing for the next one, and a tied head, which holds
a packed copy of weights that were loaded under another layer's name, is packed again too.

Upstream: https://github.com/vllm-project/vllm/pull/32133; its own text names the limit of tied parameters.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from weightlane.errors import EngineError
from weightlane_vllm.model_and_drafter import model_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor, nn

_WRAPPED = "online_process_loader"  # vLLM's name for what it wraps loaders in

_SESSIONS: weakref.WeakKeyDictionary[nn.Module, LayerwiseReload] = weakref.WeakKeyDictionary()
"""The session that a model is in: a lane and vLLM's own weight transfer may both want one."""


_SCRATCH: weakref.WeakKeyDictionary[nn.Module, frozenset[str]] = weakref.WeakKeyDictionary()
"""The buffers of a layer that were no part of its checkpoint when it was first seen out of a session."""


class LayerwiseReload:
    """A session of one model: from `begin` until `finish` or `abandon` its layers have no data.

    Args:
        model: the live one, LoRA wrappers included; with its drafter under one root where that is loaded too.
        vllm_config: the engine's; layers read it while they are packed.
    """

    def __init__(self, model: nn.Module, vllm_config: Any) -> None:
        self._model = model
        self._config = vllm_config

    def begin(self) -> None:
        """Puts every layer in its loading form; what a session before left behind is dropped first."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        abandon(self._model)
        with set_current_vllm_config(self._config):
            try:
                initialize_layerwise_reload(self._model)
            except BaseException:
                abandon(self._model)
                raise
        _SESSIONS[model_of(self._model)] = self

    def load(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Gives `tensors` to the model's loader; an error ends the session.

        Raises:
            EngineError: the session has ended.
        """
        import torch
        from vllm.config import set_current_vllm_config

        self._require_open()
        load: Any = self._model.load_weights
        try:
            with torch.no_grad(), set_current_vllm_config(self._config):
                load(owned for owned in _owned(tensors))
        except BaseException:
            self.abandon()
            raise

    def finish(self) -> None:
        """Packs what is not packed yet, and tied heads again; an error ends the session too.

        Raises:
            EngineError: the session has ended.
        """
        import torch
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        self._require_open()
        try:
            with torch.no_grad(), set_current_vllm_config(self._config):
                finalize_layerwise_reload(self._model, self._config.model_config)
                abandon(self._model)  # nothing is open; loaders that are still wrapped would drop later loads
                pack_tied_again(self._model)
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Ends the session without its outcome: layers that were whole are new, the others as before."""
        abandon(self._model)

    def _require_open(self) -> None:
        if _SESSIONS.get(model_of(self._model)) is not self or not is_open(self._model):
            raise EngineError(
                "The layerwise reload of this vLLM worker has ended.",
                "Another sync, another lane's connect or an error of the engine ended it in the middle.",
                "Run a full sync again.",
            )


def is_open(model: nn.Module) -> bool:
    """Whether any layer waits for its weights."""
    from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO

    return any(layer in LAYERWISE_INFO and LAYERWISE_INFO[layer].can_load() for layer in model.modules())


def abandon(model: nn.Module) -> None:
    """Puts back the tensors of every layer that waits, and the loaders that a session had wrapped.

    The engine itself begins no layer anew that still waits: shards of two versions would be counted as one
    whole layer.
    """
    try:
        from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO, LOADING_LAYERS
    except ImportError:
        return  # a vLLM without layerwise reload has no sessions

    _SESSIONS.pop(model_of(model), None)
    for layer in model.modules():
        info = LAYERWISE_INFO.get(layer)
        if info is not None and info.can_load():
            if info.kernel_tensors is not None:
                _put_back(layer, info)
            info.reset()
        else:
            note_scratch(layer)
        keep_scratch(layer)
    put_loaders_back(model)
    LOADING_LAYERS.clear()
    if hasattr(model, "_original_do_torchao_reload"):
        model._do_torchao_reload = model._original_do_torchao_reload


def note_scratch(layer: nn.Module) -> None:
    """Notes which buffers of a layer are no part of its checkpoint; what was noted once stays."""
    _SCRATCH.setdefault(layer, frozenset(layer._non_persistent_buffers_set))


def keep_scratch(layer: nn.Module) -> None:
    """Makes those what they were: a reload of vLLM before 0.27 makes every buffer persistent.

    A rotary cache would then look like a weight that nobody sends.
    """
    layer._non_persistent_buffers_set.update(_SCRATCH.get(layer, frozenset()) & layer._buffers.keys())


def put_loaders_back(model: nn.Module) -> None:
    """Undoes the wrapping of loaders after a session, the engine's own (`reload_weights`) included.

    The engine leaves it on its records and on biases. Outside of a session such a loader drops what it is
    given without a word, so that a trace, which takes the records as the form to load, would find nothing.
    """
    from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO

    for layer in model.modules():
        info = LAYERWISE_INFO.get(layer)
        recorded = info.restore_metadata if info is not None else ()
        for tensors in (layer._parameters, layer._buffers, *recorded):
            for tensor in tensors.values():
                if tensor is not None:
                    _unwrap(tensor)


def pack_tied_again(model: nn.Module) -> None:
    """Runs the engine's own processing of layers that share a parameter: a load reaches one of them alone.

    Only where the parameter still has its data, so that what is packed is what was loaded.
    """
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    holders: dict[int, list[nn.Module]] = {}
    for layer in model.modules():
        for parameter in layer._parameters.values():
            if parameter is not None and parameter.numel():
                holders.setdefault(id(parameter), []).append(layer)
    for sharing in holders.values():
        for layer in sharing if len(sharing) > 1 else ():
            method = getattr(layer, "quant_method", None)
            if isinstance(method, QuantizeMethodBase):
                method.process_weights_after_loading(layer)


def _owned(tensors: Sequence[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors:
        yield name, tensor.clone()


def _put_back(layer: nn.Module, info: Any) -> None:
    for own in (layer._parameters, layer._buffers):
        for name in [name for name, tensor in own.items() if tensor is not None]:
            delattr(layer, name)
    parameters, buffers = info.kernel_tensors
    # Before 0.27 the engine keeps no record of these; `keep_scratch` does.
    not_persistent = getattr(info, "kernel_non_persistent_buffers", ())
    for name, parameter in parameters.items():
        layer.register_parameter(name, parameter)
    for name, buffer in buffers.items():
        layer.register_buffer(name, buffer, persistent=name not in not_persistent)


def _unwrap(tensor: Any) -> None:
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    loader = getattr(tensor, "weight_loader", None)
    if getattr(loader, "__name__", "") != _WRAPPED:
        return
    while getattr(loader, "__name__", "") == _WRAPPED:
        loader = getattr(loader, "__wrapped__")  # noqa: B009 - of a callable of unknown kind
    if loader is default_weight_loader and "weight_loader" in tensor.__dict__:
        del tensor.weight_loader  # it had none of its own
    else:
        tensor.weight_loader = loader
