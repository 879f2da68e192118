"""The trainer's side of the parity program: a real model, wrapped as its mode asks, sharded or whole.

Every rank makes the same steps from the same seeded data, so that replicated copies stay equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
import torch.distributed as dist

import weightlane as wl

if TYPE_CHECKING:
    from weightlane.specs import TrainerSpec

Training: TypeAlias = Literal["noise", "optimizer"]
"""What happens before each sync: seeded noise on every trained parameter, or one step of AdamW."""

ADAPTER = "default"
_TOKENS_OF_A_STEP = 32


@dataclass(frozen=True, slots=True)
class ParityTrainer:
    """A model on this rank, and how it is to be trained and exported.

    `speaks_on_all`: its forward is a collective, so that every rank must ask it the same.
    """

    model: torch.nn.Module
    spec: TrainerSpec
    optimizer: torch.optim.Optimizer | None
    noise: float
    speaks_on_all: bool

    def change(self, seed: int) -> None:
        """One step, the same on every rank."""
        if self.optimizer is None:
            change_weights(self.model, noise=self.noise, seed=seed)
            return
        generator = torch.Generator().manual_seed(seed)
        vocabulary = int(_config(self.model).vocab_size)
        tokens = torch.randint(1, vocabulary, (1, _TOKENS_OF_A_STEP), generator=generator)
        self.optimizer.zero_grad(set_to_none=True)
        logits = self.model(input_ids=tokens, use_cache=False).logits.float()
        loss = torch.nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:])
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()


def make_trainer(
    folder: str,
    *,
    trainer: str,
    mode: str,
    placement: Literal["replicated", "partitioned"],
    training: Training,
    noise: float,
    learning_rate: float,
) -> ParityTrainer:
    """Loads the checkpoint in float32; with LoRA of rank 16 on all linear layers in other modes than full.

    Args:
        folder: the checkpoint.
        trainer: `torch`, or `fsdp`: FSDP2 over all ranks, one unit a layer.
        mode: of the lane.
        placement: `partitioned`: every n-th tensor on each rank, as a trainer with stages would hold.
        training: what changes the weights; `fsdp` takes the optimizer.
        noise: of each step with `noise`, in spreads of a matrix.
        learning_rate: of AdamW.
    """
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if mode != "full":
        model = _with_lora(model)
    model.train(mode=False)
    if trainer == "fsdp":
        _shard(model)
    options: dict[str, Any] = {} if mode == "full" else {"adapter": ADAPTER}
    held = held_by_this_rank(model, placement)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=learning_rate) if training == "optimizer" else None
    return ParityTrainer(
        model=model,
        spec=wl.trainer(trainer, model=held, placement=placement, **options),
        optimizer=optimizer,
        noise=noise,
        speaks_on_all=trainer == "fsdp",
    )


def change_weights(model: torch.nn.Module, *, noise: float, seed: int) -> None:
    """Adds seeded noise, `noise` times each trained matrix's own spread, equally on every rank."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.requires_grad:
                continue
            sample = torch.randn(parameter.shape, generator=generator)
            spread = float(parameter.std()) if parameter.numel() > 1 else 0.0
            # A norm of ones or a bias of zeros has no spread, and must change too or its loss goes unseen.
            parameter.add_(sample * (spread or 1.0) * noise)


def held_by_this_rank(model: torch.nn.Module, placement: str) -> Any:
    """The whole module, or for `partitioned` every n-th tensor, as a trainer with stages would hold."""
    if placement == "replicated" or not dist.is_initialized():
        return model
    rank, world_size = dist.get_rank(), dist.get_world_size()
    named = model.state_dict(keep_vars=True)
    return {
        name: tensor for number, (name, tensor) in enumerate(named.items()) if number % world_size == rank
    }


def _with_lora(model: Any) -> Any:
    import warnings

    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
    with torch.random.fork_rng(), warnings.catch_warnings():
        # peft asks transformers for a name that the latter is about to drop.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        torch.manual_seed(1)  # the same matrices on every rank
        return get_peft_model(model, config, adapter_name=ADAPTER)


def _shard(model: Any) -> None:
    """FSDP2, a unit a decoder layer and one for the rest, gathered once for all forwards until a step."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    for layer in inner.model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)


def _config(model: Any) -> Any:
    return model.config.get_text_config()
