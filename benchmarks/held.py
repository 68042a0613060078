"""What autograd holds for the backward, and what is computed again: told from the traced values, beside a real run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

import partita
from benchmarks.rows import Row, Target, at_most
from benchmarks.scales import Scale
from partita.plans.memory import SavedBytes, saved_memory
from partita.policies import ByModule
from partita.treatments import Recompute

__all__ = ["rows"]


def rows(scale: Scale) -> Iterator[Row]:
    """Five models in training, as they are and with every layer recomputed."""
    layers = min(max(scale.layers, 1), 12)
    width, target = (256, at_most(1)) if layers == 12 else (32, None)
    for name, make in _MODELS.items():
        model = make(layers, width)
        yield from _rows(f"{name}, {model.count} layers", model, target)


@dataclass(frozen=True, slots=True)
class _Model:
    module: nn.Module
    inputs: dict[str, Tensor]
    #: Where its layers are, and how many.
    layers: str
    count: int


def _rows(case: str, model: _Model, target: Target | None) -> Iterator[Row]:
    program = partita.capture(model.module.train(), (), model.inputs)
    plan = partita.plan(program, ByModule(model.layers), Recompute())
    assert len(plan.partition) == model.count
    total = saved_memory(plan.partition, plan.treatments).total
    assert total is not None
    plain, treated = program.module(), plan.apply().module()
    held = [_held_bytes(module, model.inputs) for module in (plain, treated)]
    flops = [_training_flops(module, model.inputs) for module in (plain, treated)]
    for section, what, unit, (ours, theirs) in (
        ("held for the backward", "plain", "MB", (_megabytes(total, treated=False), held[0] / 1e6)),
        ("held for the backward", "each recomputed", "MB", (_megabytes(total, treated=True), held[1] / 1e6)),
        ("computed again", "each recomputed", "GFLOP", (total.extra_flops / 1e9, (flops[1] - flops[0]) / 1e9)),
    ):
        yield Row(
            section=section,
            case=f"{case}, {what}",
            unit=unit,
            ours=ours,
            beside="a real run",
            other=theirs,
            reading="% apart",
            value=abs(ours - theirs) / theirs * 100,
            target=target,
        )


def _megabytes(holding: SavedBytes, *, treated: bool) -> float:
    found = holding.treated_bytes if treated else holding.plain_bytes
    assert found is not None
    return found / 1e6


def _held_bytes(module: nn.Module, inputs: dict[str, Tensor]) -> int:
    """What the history of the results alone keeps alive; parameters and buffers are left out."""
    with _Births() as births:
        logits = module(**{name: value.clone() for name, value in inputs.items()}).logits
    history = logits.grad_fn
    del logits
    owned = {tensor.untyped_storage()._cdata for tensor in (*module.parameters(), *module.buffers())}
    alive = {address: size for address, (storage, size) in births.seen.items() if not storage.expired()}
    del history
    return sum(size for address, size in alive.items() if address not in owned)


class _Births(TorchDispatchMode):
    """The storages of all results, by address; one that is taken again replaces the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.seen[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result


def _training_flops(module: nn.Module, inputs: dict[str, Tensor]) -> int:
    """Of one forward and backward."""
    with FlopCounterMode(display=False, custom_mapping=_ATTENTION) as counter:
        module(**inputs).logits.square().mean().backward()
    return int(counter.get_total_flops())


def _attention_flops(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


#: torch's counter knows the attention of accelerators only.
_ATTENTION: dict[Any, Any] = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops}


def _tokens(seed: int = 0) -> Tensor:
    return torch.randint(2, 512, (2, 64), generator=torch.Generator().manual_seed(seed))


def _gpt2(layers: int, width: int) -> _Model:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=width, n_layer=layers, n_head=4, n_positions=64, use_cache=False, vocab_size=512, **_ENDS
    )
    return _Model(GPT2LMHeadModel(config), {"input_ids": _tokens()}, "transformer.h.*", layers)


def _bert(layers: int, width: int) -> _Model:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(vocab_size=512, **_sizes(layers, width))
    return _Model(BertForMaskedLM(config), {"input_ids": _tokens()}, "bert.encoder.layer.*", layers)


def _llama(layers: int, width: int) -> _Model:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=512, num_key_value_heads=2, use_cache=False, **_ENDS, **_sizes(layers, width))
    return _Model(LlamaForCausalLM(config), {"input_ids": _tokens()}, "model.layers.*", layers)


def _t5(layers: int, width: int) -> _Model:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=512, d_model=width, d_ff=2 * width, d_kv=width // 4, num_layers=layers, num_heads=4, use_cache=False
    )
    inputs = {"input_ids": _tokens(), "decoder_input_ids": _tokens(1)}
    return _Model(T5ForConditionalGeneration(config), inputs, "*coder.block.*", 2 * layers)


def _vit(layers: int, width: int) -> _Model:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(image_size=64, patch_size=8, **_sizes(layers, width))
    return _Model(ViTForImageClassification(config), {"pixel_values": torch.ones(2, 3, 64, 64)}, "*.layers.*", layers)


def _sizes(layers: int, width: int) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
    }


_ENDS = {"bos_token_id": 0, "eos_token_id": 1}

_MODELS: dict[str, Callable[[int, int], _Model]] = {
    "GPT-2": _gpt2,
    "BERT": _bert,
    "Llama": _llama,
    "T5": _t5,
    "ViT": _vit,
}
