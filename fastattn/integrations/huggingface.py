"""Hugging Face transformers on fastattn's attention: ``attn_implementation="fastattn"``.

    from fastattn.integrations import huggingface
    model = huggingface.use(AutoModelForSeq2SeqLM.from_pretrained(name))

Padding, causal masks and the tokens of a cache become AttentionMasks. They are built once a forward pass and shared by
all layers, without a tensor of the size of the scores; so do sliding windows. Other masks that transformers composes of
functions (packed positions, overlays) and those of static caches, whose length is a tensor, become one bool tensor, as
for its own "sdpa". Scores may be capped, and heads have attention sinks. Grouped heads are not repeated, and T5's
relative bias gets its gradient. Unlike with transformers' "eager", a query that may attend to nothing gives 0.

Refused, with the reason: keys that an indexer chose, and paged caches. `use` refuses models with the first before a
call. It also refuses models such as LED, which do not ask transformers for their attention: they would silently compute
something else.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fastattn._tracing import is_traced
from fastattn.masks import AttentionMask
from fastattn.nn.leaves import is_small, is_whole
from fastattn.ops._combine import add_sinks, merge
from fastattn.ops.attention import scaled_dot_product_attention

try:
    from transformers import (
        AttentionInterface,
        AttentionMaskInterface,
        PreTrainedConfig,
        PreTrainedModel,
        masking_utils,
    )
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask
except ImportError as error:
    raise ImportError(
        'fastattn.integrations.huggingface needs transformers: pip install "fastattn[huggingface]"'
    ) from error

NAME = "fastattn"
_REFUSED = {
    "indices": "this model chooses the keys of each query, which fastattn does not read",
    "block_indices": "this model chooses the keys of each query, which fastattn does not read",
    "cache": "continuous batching keeps keys and values in pages, which fastattn does not read",
    "head_mask": "fastattn does not mask heads",
}
_BY_ITSELF = (
    "computes its attention by itself, without transformers' AttentionInterface, and would ignore "
    'attn_implementation="fastattn"'
)

# What changes a call of attention, next to its tensors and masks.
CHANGES_ATTENTION = (*_REFUSED, "is_causal", "position_bias", "softcap", "s_aux", "sinks")

Model = TypeVar("Model", bound=nn.Module)


def register() -> None:
    """Make ``attn_implementation="fastattn"`` known to transformers, for from_pretrained and configs."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)


def use(model: Model) -> Model:
    """The model itself, its attention and that of its submodels now fastattn's.

    model: a transformers model, or a module that contains one, such as peft or torch.compile makes.
    save_pretrained does not store the choice: from_pretrained of a saved model needs `use` again.
    Raises TypeError for what holds no transformers model, ValueError for one whose attention fastattn does not compute.
    """
    found = parts(model) if isinstance(model, nn.Module) else []
    if not found:
        raise TypeError(f"model must be or hold a transformers.PreTrainedModel, got {type(model).__name__}")
    for part in found:
        if part.reason is not None:
            raise ValueError(f"{type(part.model).__name__}: {part.reason}")
    set_attention(found)
    return model


@dataclass
class Part:
    """The modules of a model whose attention one config chooses.

    model: the outermost transformers model with this config.   configs: this one, and its modules' own, by id.
    reason: why fastattn does not compute their attention.      has_attention: whether they use AttentionInterface.
    before: the configs that set_attention changed, with the attention that they chose before.
    """

    path: str
    model: PreTrainedModel
    configs: dict[int, PreTrainedConfig] = field(default_factory=dict)
    reason: str | None = None
    has_attention: bool = False
    before: list[tuple[PreTrainedConfig, str]] = field(default_factory=list)


def parts(model: nn.Module) -> list[Part]:
    """The parts of every transformers model in a model."""
    found: dict[int, Part] = {}
    part_at: dict[str, Part | None] = {}
    for path, module in model.named_modules():
        part = part_at[path.rpartition(".")[0]] if path else None
        if isinstance(module, PreTrainedModel):
            part = found.setdefault(id(module.config), Part(path, module))
            if not module._can_set_attn_implementation():
                part.reason = _BY_ITSELF
        part_at[path] = part
        if part is None:
            continue
        config, given = getattr(module, "config", None), _refused_options(type(module))
        if isinstance(config, PreTrainedConfig):  # a layer may have another than its model
            part.configs[id(config)] = config
        if given is not None:
            part.has_attention = True
            reasons = [_REFUSED[name] for name, value in given.items() if _may_be_given(value, module)]
            part.reason = part.reason or next(iter(reasons), None)
    return list(found.values())


def set_attention(found: list[Part]) -> None:
    """Choose fastattn's attention in all parts without a reason against it."""
    register()
    kept = {key for part in found if part.reason is not None for key in part.configs}
    for part in found:
        configs = list(part.configs.values()) if part.reason is None else []
        for config in configs:  # and those of submodels, which masks may be made with
            inner = [getattr(config, name, None) for name in config.sub_configs]
            configs += [c for c in inner if isinstance(c, PreTrainedConfig)]
            if id(config) not in kept and config._attn_implementation != NAME:
                part.before.append((config, config._attn_implementation))
                config._attn_implementation_internal = NAME  # of this config alone


@functools.cache
def _refused_options(kind: type[nn.Module]) -> dict[str, ast.expr] | None:
    """The options of _REFUSED that a class gives transformers' attention function, as written. None if none."""
    forward = inspect.unwrap(getattr(kind, "forward", None))
    code = getattr(forward, "__code__", None)
    if code is None or "ALL_ATTENTION_FUNCTIONS" not in code.co_names:
        return None
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except OSError:  # of a class that was typed into a shell
        return {}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args]
    calls = [call for call in calls if ast.unparse(call.args[0]) == "self"]  # the attention's module
    return {option.arg: option.value for call in calls for option in call.keywords if option.arg in _REFUSED}


def _may_be_given(value: ast.expr, module: Any) -> bool:
    """Whether an argument is not None: a constant, an attribute of the module, or what only a call knows."""
    if isinstance(value, ast.Constant):
        return value.value is not None
    first, *names = ast.unparse(value).split(".")
    if first != "self" or not all(name.isidentifier() for name in names):
        return True
    return functools.reduce(lambda found, name: getattr(found, name, None), names, module) is not None


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | AttentionMask | MergedMask | None,
    dropout: float | None = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    output_attentions: bool | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """transformers' attention function: query (B, H, Lq, D), key and value (B, Hk, Lk, D) -> (B, Lq, H, D), weights.

    s_aux or sinks: (H,) or (B, H, Lq, 1), scores of attention sinks.
    position_bias: (1, H, Lq, Lk), added to the scores, or (H, Lq + Lk - 1), AttentionMask's relative_bias. Options that
    change nothing here are accepted. ValueError for options that would change the result and are not supported.
    """
    for name in _REFUSED:
        if options.get(name) is not None:
            raise ValueError(f"{type(module).__name__}: {_REFUSED[name]}; use another attn_implementation")
    Lq, Lk = query.shape[2], key.shape[2]
    has_own_mask = isinstance(attention_mask, (AttentionMask, MergedMask))
    is_theirs = not has_own_mask and is_small(query.device, query.shape[0], Lq, Lk)
    if position_bias is not None:
        if getattr(module, "is_decoder", False) and not getattr(module, "is_causal", True):
            position_bias = None  # T5's attention to the encoder has none, and is given zeros
        elif position_bias.dim() == 2:
            is_theirs = False
        elif not (is_theirs or dropout or is_whole(query)):
            # A training step of T5, width 256, 4 x 256 tokens: 348 ms by fastattn's attention, 321 by PyTorch's.
            is_theirs, attention_mask = True, getattr(attention_mask, "tensor", attention_mask)
    is_causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    sinks = s_aux if sinks is None else sinks
    is_theirs = is_theirs and softcap is None and sinks is None and not output_attentions
    if is_theirs and not isinstance(attention_mask, (AttentionMask, MergedMask)):
        given = {"scaling": scaling, "is_causal": is_causal, "position_bias": position_bias, **options}
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout or 0.0, **given)
    causal = attention_mask is None and Lq > 1 and is_causal
    if causal and Lk > Lq:  # the first tokens of a static cache: the rest is not filled yet
        key, value = key[:, :, :Lq], value[:, :, :Lq]
        if position_bias is not None:
            position_bias = position_bias[..., : Lq if position_bias.dim() == 4 else 2 * Lq - 1]
    attend = functools.partial(
        scaled_dot_product_attention,
        dropout_p=dropout or 0.0,  # a config may say None
        scale=scaling,
        enable_gqa=bool(key.shape[1] != query.shape[1]),  # torch.jit.trace has tensors for sizes
        softcap=softcap,
    )
    if isinstance(attention_mask, MergedMask):
        if sinks is None and position_bias is None and not output_attentions:
            return attention_mask.attend(attend, query, key, value).transpose(1, 2).contiguous(), None
        attention_mask = attention_mask.tensor
    results = {"return_lse": sinks is not None, "return_weights": bool(output_attentions)}  # peft hands on None
    result = attend(query, key, value, _with_bias(attention_mask, position_bias), is_causal=causal, **results)
    if sinks is None:
        out, weights = result if output_attentions else (result, None)
    else:
        out, lse, *others = result
        out, with_sinks = add_sinks(out, lse, sinks.squeeze(-1) if sinks.dim() == 4 else sinks)
        # Of a query without keys both may be -inf.
        share = torch.exp(lse - with_sinks.clamp(min=torch.finfo(lse.dtype).min)).to(out.dtype)[..., None]
        weights = others[0] * share if output_attentions else None
    return out.transpose(1, 2).contiguous(), weights


def _with_relative_bias(mask: Tensor | AttentionMask | None, bias: Tensor) -> AttentionMask:
    mask = AttentionMask.of(mask)
    return AttentionMask(relative_bias=bias) if mask is None else mask.replace(relative_bias=bias)


def _with_bias(mask: Tensor | AttentionMask | None, bias: Tensor | None) -> Tensor | AttentionMask | None:
    if bias is None:
        hides = not isinstance(mask, AttentionMask) or not mask.band_only or mask.has_band or mask.any_bias is not None
        return mask if hides else None
    if bias.dim() == 2:
        if is_traced():
            return _with_relative_bias(mask, bias)
        # One mask for all layers, which share the bias: what a CPU adds to the scores is made once. It lives as long. A
        # mask with a bias that learns holds it, and lives as long as the layers' plan.
        learns = bias.requires_grad
        given, known, _ = getattr(bias, "_mask_of_layers", (None, lambda: None, None))
        shared = known()
        if shared is None or given is not mask or shared.relative_bias.requires_grad is not learns:
            shared = _with_relative_bias(mask, bias if learns else bias.detach())
            bias.__dict__["_mask_of_layers"] = mask, weakref.ref(shared), None if learns else shared
        return shared
    if isinstance(mask, AttentionMask):
        return mask.with_bias(bias) if mask.bias is None else mask.with_bias(mask.bias + bias)
    if mask is None:
        return AttentionMask(bias=bias)
    return AttentionMask(mask, bias=bias) if mask.dtype == torch.bool else AttentionMask(bias=mask + bias)


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | AttentionMask | None = None,
    **options: Any,
) -> Tensor | AttentionMask | None:
    """transformers' mask function. Query i is at position i + q_offset, key j at j + kv_offset.

    attention_mask: bool (B, L), True = a real token, over all positions so far.
    """
    if isinstance(attention_mask, AttentionMask):  # generate() made it for a static cache before the forward
        return attention_mask
    device = options.get("device", "cpu")
    if is_small(device, batch_size, q_length, kv_length) and _has_sdpa(type(options.get("config"))):
        sizes = batch_size, q_length, kv_length
        return sdpa_mask(*sizes, q_offset, kv_offset, mask_function, attention_mask, **options)
    made_for = (batch_size, 1, q_length, kv_length), options
    needs_tensor = getattr(options.get("config"), "model_type", None) in _EXTENDED
    if not (needs_tensor or isinstance(q_offset, Tensor)) and (band := _band_of(mask_function)) is not None:
        key_padding = None
        if attention_mask is not None:
            missing = kv_offset + kv_length - attention_mask.shape[1]
            key_padding = F.pad(attention_mask, (0, missing)) if missing > 0 else attention_mask
            key_padding = key_padding[:, kv_offset : kv_offset + kv_length]
        shift = q_offset - kv_offset
        left, right = band
        if left is not None and left >= shift + q_length - 1:  # the last query reads the first key
            left = None
        if right is not None and right >= kv_length - 1 - shift:
            right = None
        if left is None and right is None:
            return ReadableMask(*made_for, key_padding=key_padding)
        if shift in (0, kv_length - q_length):
            align = "top_left" if shift == 0 else "bottom_right"
            return ReadableMask(*made_for, key_padding=key_padding, window=(left, right), align=align)
    if isinstance(q_offset, Tensor):  # the cache's own counter, which changes while the mask is in use
        q_offset = q_offset.clone()
    dense = sdpa_mask(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, **options)
    mask = dense if dense is None else ReadableMask(*made_for, dense)
    return mask.tensor if needs_tensor and mask is not None else mask


def _band_of(mask_function: Callable[..., Any]) -> tuple[int | None, int | None] | None:
    """The window (left, right) of a mask function of transformers; None where it is another restriction."""
    if mask_function is bidirectional_mask_function:
        return None, None
    if mask_function is causal_mask_function:
        return None, 0
    if torch.compiler.is_compiling():  # which cannot read closures
        return None
    parts = inspect.getclosurevars(mask_function).nonlocals.get("mask_functions", ())
    if len(parts) != 2 or getattr(parts[0], "__code__", None) not in _WINDOWS:
        return None
    size = inspect.getclosurevars(parts[0]).nonlocals["sliding_window"]
    if parts[1] is causal_mask_function and parts[0].__code__ is _LEFT_WINDOW:
        return (size - 1, 0) if size > 0 else None  # Qwen2-MoE makes a mask of size 0, which no layer reads
    if parts[1] is bidirectional_mask_function and parts[0].__code__ is not _LEFT_WINDOW:
        return size, size
    return None


_EXTENDED = {"deepseek_v4"}  # models whose attention appends keys of its own to a mask, if that is a tensor
# The code by which the overlays of sliding windows differ from others: all have the name inner_mask.
_LEFT_WINDOW = masking_utils.sliding_window_overlay(1).__code__
_WINDOWS = {_LEFT_WINDOW, masking_utils.sliding_window_bidirectional_overlay(1).__code__}


class ReadableMask(AttentionMask):
    """An AttentionMask that models may read as the tensor that transformers would have made: slice it, add it.

    shape: of this tensor, (B, 1, Lq, Lk).      made_for: its device, dtype and config, as transformers names them.
    """

    ndim = 4

    def __init__(
        self, shape: tuple[int, ...], made_for: dict[str, Any], attn_mask: Tensor | None = None, **options: Any
    ) -> None:
        super().__init__(attn_mask, **options)
        self.shape, self._made_for = shape, made_for

    def contiguous(self) -> ReadableMask:
        return self

    @property
    def tensor(self) -> Tensor:
        """bool, True = attend, as for "sdpa". Of models without "sdpa" what is added to scores, as for "eager"."""
        B, _, Lq, Lk = self.shape
        device, dtype = self._made_for.get("device", "cpu"), self._made_for.get("dtype", torch.float32)
        keep = self.dense(B, 1, Lq, Lk, device)
        if _has_sdpa(type(self._made_for.get("config"))):
            return keep

        def build() -> Tensor:
            return torch.zeros(keep.shape, dtype=dtype, device=device).masked_fill(~keep, torch.finfo(dtype).min)

        return self.cached(("tensor", dtype), device, build)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.cat and (kwargs or {}).get("dim") == -1 and len(args[0]) == 2:
            if all(isinstance(mask, ReadableMask) for mask in args[0]):
                return MergedMask(*args[0])
        args, kwargs = tree_map_only(cls, lambda mask: mask.tensor, (args, kwargs or {}))
        return function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.endswith("_"):  # what changes the tensor would not change the mask
            raise AttributeError(f"the mask of attn_implementation={NAME!r} has no {name!r}")
        return getattr(self.tensor, name)

    def __and__(self, other: Any) -> Any:
        return super().__and__(other) if isinstance(other, AttentionMask) else self.tensor & other

    def __eq__(self, other: Any) -> Any:
        return self is other if other is None or isinstance(other, AttentionMask) else self.tensor == other

    __hash__ = AttentionMask.__hash__


class MergedMask(NamedTuple):
    """Two ReadableMasks side by side, of a query's own sequence and of a memory, whose keys one attention reads, as in
    T5Gemma 2."""

    own: ReadableMask
    memory: ReadableMask

    @property
    def tensor(self) -> Tensor:
        return torch.cat([self.own.tensor, self.memory.tensor], -1)

    def attend(self, attend: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """out (B, H, Lq, Dv), by two calls whose results are merged."""
        sizes = [self.own.shape[3], self.memory.shape[3]]
        parts = zip(key.split(sizes, 2), value.split(sizes, 2), self, strict=True)
        out, _ = merge(*(attend(query, k, v, mask, return_lse=True) for k, v, mask in parts))
        return out


def _read(name: str) -> Callable[..., Any]:
    return lambda self, *others: getattr(self.tensor, name)(*others)


for _name in "getitem invert ne lt le gt ge rand or ror add radd sub rsub mul rmul".split():
    setattr(ReadableMask, f"__{_name}__", _read(f"__{_name}__"))


@functools.cache
def _has_sdpa(kind: type) -> bool:
    """Whether all models of a config's class have transformers' "sdpa"."""
    kinds = [PreTrainedModel]
    for found in kinds:
        kinds += found.__subclasses__()
    return all(found._supports_sdpa for found in kinds if found.config_class is kind)
