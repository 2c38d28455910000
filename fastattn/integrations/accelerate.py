"""accelerate(model): a model of torch.nn or of transformers on fastattn, in place. restore(model) undoes it."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from torch import Tensor, nn

from fastattn.integrations import torch_nn
from fastattn.integrations.graphed_stacks import GraphedStack, remove_graphs, stacks
from fastattn.integrations.layers import Accelerated, accelerated_class
from fastattn.masks._checks import check_flags
from fastattn.nn.fusible import hook_reason
from fastattn.nn.leaves import Dropout, drop_kept

_CHANGED = {Dropout: nn.Dropout}


class Entry(NamedTuple):
    """One module of the model. reason: why it was skipped; None if it was replaced."""

    path: str
    kind: str
    reason: str | None


class Report:
    """What accelerate did. str(report) is a table; report.loss computes a Hugging Face model's loss without logits."""

    def __init__(self, entries: list[Entry]) -> None:
        self.entries = entries

    @property
    def replaced(self) -> list[Entry]:
        """The modules that were replaced and use fastattn now, as tuples (path, kind, reason), reason None."""
        return [entry for entry in self.entries if entry.reason is None]

    @property
    def skipped(self) -> list[Entry]:
        """The modules that were skipped, as tuples (path, kind, reason)."""
        return [entry for entry in self.entries if entry.reason is not None]

    def __str__(self) -> str:
        groups: dict[tuple[str, str | None], list[str]] = {}
        for path, kind, reason in self.entries:
            groups.setdefault((kind, reason), []).append(path)
        rows = [("skipped" if r else "replaced", str(len(p)), k, p[0], r or "") for (k, r), p in groups.items()]
        rows = [("", "modules", "class", "the first", "reason"), *sorted(rows)]
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        return "\n".join("  ".join(text.ljust(w) for text, w in zip(row, widths, strict=True)).rstrip() for row in rows)

    def loss(
        self, model: nn.Module, *, label_smoothing: float = 0.0, num_items_in_batch: Any = None, **batch: Any
    ) -> Tensor:
        """What model(**batch).loss is, a scalar with its gradients, where possible without its logits.

        model: a transformers model, or what DistributedDataParallel or peft makes of one.
        label_smoothing: as transformers' Trainer computes it.
        num_items_in_batch: the sum over all tokens is divided by it; unless given, by the tokens that count.
        batch: the model's arguments, with labels.
        ValueError without labels. TypeError for a model that gives no loss.
        See fastattn.integrations.huggingface_loss.loss.
        """
        from fastattn.integrations.huggingface_loss import loss

        return loss(model, label_smoothing=label_smoothing, num_items_in_batch=num_items_in_batch, **batch)


def accelerate(model: nn.Module, *, attention: bool = True, layers: bool = True, graphs: bool | None = None) -> Report:
    """Give the modules of a model that fastattn knows fastattn's forward, in place.

    attention: attention of torch.nn.MultiheadAttention, and of transformers' models through their AttentionInterface.
    layers: what is around it: dropout, residual connections, norms, feed-forward. torch.nn's layers need attention too.
    graphs: True trains by CUDA graphs: forward and backward of each encoder and decoder whose layers are replaced are
        one launch each, and one node of autograd, so that the training loop stays as it is. As in FusedTransformer a
        shape is captured at its third call, and what cannot be replayed runs eagerly. In training mode no cache is
        returned while gradients are recorded. False undoes it. None leaves it as it is, at first without graphs.
    Parameters and their names, state_dict, hooks and save_pretrained stay as they are, and so does the class of linear
    maps. What is modified, now or later, is called as before.
    Call it before fully_shard, which gives modules another class.
    TypeError for what is no nn.Module or no bool.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    check_flags(attention=attention, layers=layers, graphs=graphs is not None and graphs)
    entries = _take_attention(model) if attention else []
    on_cpu = all(p.device.type == "cpu" for p in model.parameters())
    known = _known_layers(layers)
    for path, module in list(model.named_modules()):
        kind, name, reason = type(module), type(module).__qualname__, None
        if isinstance(module, Accelerated) or kind in _CHANGED:
            entries.append(Entry(path, name, None))
            continue
        if (mixin := known.get(f"{kind.__module__}.{name}")) is not None:
            replacement = accelerated_class(kind, mixin)
            reason = _attention_reason(module, attention) if kind in torch_nn.MIXINS else None
        elif layers and kind is nn.Dropout and on_cpu:
            replacement = Dropout
        elif layers and (base := _known_base(kind, known)) is not None:
            reason = f"is a subclass of {base}, whose forward may be another"
        else:
            continue
        if reason is None and "forward" in module.__dict__:
            reason = hook_reason(module)
        if reason is None:
            module.__class__ = replacement
        entries.append(Entry(path, name, reason))
    for path, stack in stacks(model).items() if graphs is not None else ():
        if not graphs and isinstance(stack, GraphedStack):
            remove_graphs(stack)
        elif graphs:
            entries.append(Entry(path, f"{type(stack).__name__}: CUDA graphs", None))
            if not isinstance(stack, GraphedStack):
                stack.__class__ = accelerated_class(type(stack), GraphedStack)
    return Report(entries)


def restore(model: nn.Module) -> None:
    """Undo accelerate: every module gets its own class back, and transformers its attention.

    TypeError for what is no nn.Module. ValueError for a subclass of an accelerated class, as fully_shard makes.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    modules = dict(model.named_modules())
    for path, module in modules.items():
        if isinstance(module, Accelerated) and "original" not in vars(type(module)):
            kind = type(module).__name__
            raise ValueError(f"{path} is a {kind}, a subclass of an accelerated class, and restore knows no other")
    for module in modules.values():
        drop_kept(module)
        if isinstance(module, GraphedStack):
            remove_graphs(module)
        if isinstance(module, Accelerated):
            module.__class__ = type(module).original
        elif type(module) in _CHANGED:
            module.__class__ = _CHANGED[type(module)]
        for config, name in module.__dict__.pop(_BEFORE, ()):
            config._attn_implementation_internal = name  # of this config alone


_BEFORE = "_attention_before_fastattn"  # attribute of a model: the configs that changed, and what they said


def _known_layers(layers: bool) -> dict[str, type[Accelerated]]:
    """The mixins by the names of the classes that get them."""
    kinds = torch_nn.MIXINS if layers else [nn.MultiheadAttention]
    known = {f"{kind.__module__}.{kind.__qualname__}": torch_nn.MIXINS[kind] for kind in kinds}
    if layers and "transformers" in sys.modules:
        from fastattn.integrations.huggingface_layers import MIXINS

        known |= MIXINS
    return known


def _take_attention(model: nn.Module) -> list[Entry]:
    """transformers' models in the model take fastattn's attention, where they ask for one."""
    if "transformers" not in sys.modules:
        return []
    from fastattn.integrations import huggingface

    found, entries = huggingface.parts(model), []
    huggingface.set_attention(found)
    for part in found:
        if part.before:
            part.model.__dict__.setdefault(_BEFORE, []).extend(part.before)
        if part.has_attention or part.reason is not None:
            entries.append(Entry(part.path, f"{type(part.model).__name__}: attention", part.reason))
    return entries


def _attention_reason(module: Any, attention: bool) -> str | None:
    if not attention:
        return "attention=False"
    if isinstance(module, nn.MultiheadAttention) and (module.bias_k is not None or module.add_zero_attn):
        return "has add_bias_kv or add_zero_attn"
    return None


def _known_base(kind: type, known: dict[str, type[Accelerated]]) -> str | None:
    """The class of a known layer that this class is made of."""
    for base in kind.__mro__[1:]:
        if f"{base.__module__}.{base.__qualname__}" in known:
            return base.__qualname__
    return None
