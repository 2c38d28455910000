"""The families of models that accelerate() knows, small and with random weights, and what their tests share.

A new family is one line of FAMILIES: the tests of test_accelerate.py run for it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastattn import accelerate, use_backend
from fastattn.integrations.accelerate import Report

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Family(NamedTuple):
    """build(**changes): a model in eval mode, without dropout, its weights large enough that a wrong mask shows.

    inputs(model): a padded batch, the arguments by name, and where the outputs count.
    is_whole: whether accelerate's layers compute a call without calling their own modules.
    lacks: "float64" where the family's own code computes in float32, "one graph" where PyTorch does not compile it as
        one, "generation", "tokens" where it reads and writes none, "pickle", "hooks" where it writes into the output of
        a module, transformers' "sdpa", and "compiled" where torch.compile gives a pooler that is not used gradients.
    tolerance: of outputs; gradients may be off by ten times its atol, relative to their largest element.
    """

    build: Callable[..., nn.Module]
    inputs: Callable[..., tuple[dict[str, Any], Any]]
    is_whole: bool
    lacks: tuple[str, ...]
    tolerance: dict[str, float]


def _randomise(model: nn.Module, scale: float) -> None:
    """Biases and norms differ from those of a new model."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in [*model.named_parameters(), *model.named_buffers()]:
            if name == "final_logits_bias" or (p.dim() == 1 and p.requires_grad):
                p.add_(0.3 * torch.randn(p.shape, generator=generator))
            elif p.requires_grad and "position" not in name and "norm" not in name:
                p.mul_(scale)


# transformers.


SPECIAL = dict(vocab_size=99, pad_token_id=1, bos_token_id=0, eos_token_id=2)
SIZES = {"layers": 2, "attention_heads": 4, "ffn_dim": 48}
PAIR = SPECIAL | {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in SIZES.items()}
PAIR |= dict(d_model=32, decoder_start_token_id=2, forced_eos_token_id=None)
TEXT = PAIR | dict(max_position_embeddings=64)
STACK = SPECIAL | dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, max_position_embeddings=64
)
GROUPED = STACK | dict(num_key_value_heads=2)
GPT2 = SPECIAL | dict(n_embd=32, n_layer=2, n_head=4, n_positions=64)
SPEECH = PAIR | dict(num_mel_bins=8, max_source_positions=12, max_target_positions=40)
SPEECH |= dict(suppress_tokens=None, begin_suppress_tokens=None)
T5 = SPECIAL | dict(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, relative_attention_num_buckets=8)
T5 |= dict(decoder_start_token_id=1)
GATED = T5 | dict(feed_forward_proj="gated-gelu")
GEMMA = STACK | dict(num_key_value_heads=2, head_dim=8, query_pre_attn_scalar=8, sliding_window=6)
GEMMA |= dict(layer_types=["sliding_attention", "full_attention"], attention_dropout=0.0, dropout_rate=0.0)
CAPPED = dict(encoder=GEMMA | dict(attn_logit_softcapping=2.0), decoder=GEMMA | dict(attn_logit_softcapping=2.0))
CAPPED |= dict(vocab_size=99, dropout_rate=0.0, attention_dropout=0.0)
IMAGE = {n: STACK[n] for n in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")}
IMAGE |= dict(image_size=16, patch_size=8, num_labels=99)
SOUND = {n: STACK[n] for n in STACK if n != "max_position_embeddings"} | dict(layerdrop=0.0, apply_spec_augment=False)
SOUND |= dict(conv_dim=(32,), conv_kernel=(2,), conv_stride=(2,), feat_extract_norm="layer", conv_bias=True)
SOUND |= dict(num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2)
LACKED = "tokens pickle hooks"
STABLE = SOUND | dict(do_stable_layer_norm=True)
FRAMES = PAIR | dict(num_conv_layers=1, conv_kernel_sizes=(3,), conv_channels=16, input_feat_per_channel=8)
FRAMES |= dict(max_source_positions=40, max_target_positions=40)
SEAMLESS = TEXT | dict(hidden_size=32, speech_encoder_layers=1, speech_encoder_attention_heads=4)
DISTIL = SPECIAL | dict(dim=32, n_layers=2, n_heads=4, hidden_dim=48, max_position_embeddings=64)
MODERN = STACK | dict(global_attn_every_n_layers=2, local_attention=4, cls_token_id=0, sep_token_id=2)
READER = STACK | dict(model_type="bert", is_decoder=True, add_cross_attention=True)
BERTS = dict(encoder=STACK | dict(model_type="bert"), decoder=READER, decoder_start_token_id=0, pad_token_id=1)
CAPTION = BERTS | dict(encoder=IMAGE | dict(model_type="deit"))
LENGTHS = (9, 5, 7)


def huggingface(
    kind: str, config: str, options: dict[str, Any], is_whole: bool = False, lacks: str = "", scale: float = 3.0
) -> Family:
    """A family of transformers, whose own attention is the eager one."""

    @functools.cache
    def built(**changes: Any) -> nn.Module:
        return tiny(kind, f"{config}Config", scale, **options | changes)

    def build(**changes: Any) -> nn.Module:
        return copy.deepcopy(built(**changes))

    return Family(build, _batch, is_whole, tuple(lacks.split()), dict(rtol=0.0, atol=1e-4))


def tiny(kind: str, config: str, scale: float = 3.0, **options: Any) -> Any:
    """A model of transformers by the names of its class and of its config's."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, config)(**options))
    _randomise(model, scale)
    set_dropout(model, 0.0)
    if hasattr(model, "freeze_feature_encoder"):  # which changes what an input with a gradient gives it
        model.freeze_feature_encoder()
    return eager(model)


def eager(model: Any) -> Any:
    """The model in eval mode, its attention transformers' eager one."""
    model.set_attn_implementation("eager")
    for module in model.modules():  # in transformers 5.15 T5's stacks have configs of their own
        if hasattr(getattr(module, "config", None), "_attn_implementation"):
            module.config._attn_implementation = "eager"
    return model.to(DEVICE).eval()


def _batch(model: Any, left: bool = False) -> tuple[dict[str, Any], Tensor]:
    """Sentences of LENGTHS. left: padded on the left."""
    generator, longest = torch.Generator().manual_seed(3), max(LENGTHS)
    real = (torch.arange(longest) < torch.tensor(LENGTHS)[:, None]).to(DEVICE)
    ids = torch.randint(3, 99, (3, longest), generator=generator).to(DEVICE).masked_fill(~real, 1)
    if left:
        ids, real = ids.flip(1), real.flip(1)
    dtype, kind = next(model.parameters()).dtype, model.main_input_name

    def drawn(*shape: int) -> Tensor:
        return torch.randn(3, *shape, generator=generator).to(DEVICE, dtype)

    inputs = {"attention_mask": real.long()}
    if kind == "pixel_values":
        inputs = {kind: drawn(3, 16, 16)}
    elif model.config.model_type == "whisper":  # padding follows the targets
        inputs = {kind: drawn(8, 24)}
    elif kind == "input_ids":
        inputs[kind] = ids
    else:  # a model of sound makes one token of two samples or frames
        there = real.repeat_interleave(2, 1)
        samples = drawn(2 * longest, 8).masked_fill(~there[..., None], 0)
        inputs = {kind: samples[..., 0] if kind == "input_values" else samples, "attention_mask": there.long()}
    if kind == "pixel_values" and not model.config.is_encoder_decoder:
        return inputs, real.any(1)
    if model.config.is_encoder_decoder:  # targets are padded at their end
        targets, there = (ids.flip(1).clamp(min=2), real.flip(1)) if left else (ids, real)
        inputs["decoder_input_ids"] = targets
        if model.config.model_type != "whisper":
            inputs["decoder_attention_mask"] = there.long()
    return inputs, real


# torch.nn.


D, HEADS, N, L, S = 16, 4, 2, 5, 7
KINDS = ("attention", "encoder layer", "decoder layer", "encoder", "decoder", "transformer")


def torch_nn(kind: str, **options: Any) -> Family:
    def build(**changes: Any) -> nn.Module:
        return layer(kind, **options | changes).eval()

    def inputs(model: nn.Module) -> tuple[dict[str, Any], Any]:
        given = tensors_of(kind, next(model.parameters()).dtype) | masks_of(kind, (torch.bool, torch.bool))
        if kind == "attention":
            return given | {"need_weights": False}, ...
        side = "src" if kind.startswith("encoder") else "tgt"
        given["mask" if kind == "encoder" else f"{side}_mask"] = causal(L)
        return given, ~given[f"{side}_key_padding_mask"]

    return Family(build, inputs, kind != "attention", (), dict(rtol=1e-5, atol=1e-5))


def layer(kind: str, scale: float = 2.0, **options: Any) -> nn.Module:
    """A small module of torch.nn in training mode."""
    torch.manual_seed(0)
    options = dict(batch_first=True) | options
    if kind == "attention":
        module: Any = nn.MultiheadAttention(**dict(embed_dim=D, num_heads=HEADS) | options)
    else:
        options = dict(d_model=D, nhead=HEADS, dim_feedforward=24, dropout=0.0) | options
        if kind == "transformer":
            module = nn.Transformer(**dict(num_encoder_layers=2, num_decoder_layers=2) | options)
        else:
            side, *is_layer = kind.split()
            module = getattr(nn, f"Transformer{side.title()}Layer")(**options)
            if not is_layer:
                stack = getattr(nn, f"Transformer{side.title()}")
                module = stack(module, 2, nn.LayerNorm(options["d_model"]))
    _randomise(module, scale)
    return module.to(DEVICE)


NAMES = {"attention": ("query", "key", "value"), "encoder": ("src",), "decoder": ("tgt", "memory")}
NAMES |= {"transformer": ("src", "tgt")}


def tensors_of(
    kind: str, dtype: torch.dtype = torch.float32, batch_first: bool = True, d_model: int = D
) -> dict[str, Tensor]:
    lengths = {"attention": (L, S, S), "encoder": (L,), "transformer": (S, L)}.get(kind.split()[0], (L, S))
    generator = torch.Generator().manual_seed(1)
    made = [torch.randn(N, n, d_model, generator=generator, dtype=dtype).to(DEVICE) for n in lengths]
    made = [t if batch_first else t.transpose(0, 1).contiguous() for t in made]
    return dict(zip(NAMES[kind.split()[0]], made, strict=True))


def mask(rows: int, columns: int, is_3d: bool = False, kind: torch.dtype = torch.bool) -> Tensor:
    """True or -inf, and other values of a float mask, where blocked. Every query has a key."""
    shape = (N * HEADS, rows, columns) if is_3d else (rows, columns)
    generator = torch.Generator().manual_seed(rows + columns)
    blocked = torch.rand(shape, generator=generator) < 0.4
    blocked[..., 0] = False
    if kind != torch.bool:
        blocked = torch.randn(shape, generator=generator, dtype=kind).masked_fill(blocked, -torch.inf)
    return blocked.to(DEVICE)


def padding(length: int, kind: torch.dtype = torch.bool) -> Tensor:
    blocked = torch.arange(length) >= torch.tensor([length, length - 2])[:, None]
    return (blocked if kind == torch.bool else torch.zeros(N, length, dtype=kind).masked_fill(blocked, -9.0)).to(DEVICE)


def causal(length: int, kind: torch.dtype = torch.bool) -> Tensor:
    blocked = torch.ones(length, length).triu(1).bool()
    blocked = blocked if kind == torch.bool else torch.zeros(length, length).masked_fill(blocked, -torch.inf)
    return blocked.to(DEVICE)


def masks_of(kind: str, kinds: tuple[Any, Any], is_3d: bool = False) -> dict[str, Tensor]:
    """Masks and blocked keys of every attention. kinds: their dtypes, None: no mask."""
    encoder = "mask" if kind == "encoder" else "src_mask", "src_key_padding_mask"
    sides = {"attention": [("attn_mask", "key_padding_mask", L, S)], "encoder": [(*encoder, L, L)]}.get(kind.split()[0])
    if sides is None:
        sides = [("tgt_mask", "tgt_key_padding_mask", L, L), ("memory_mask", "memory_key_padding_mask", L, S)]
        sides += [(*encoder, S, S)] if kind == "transformer" else []
    made = {}
    for name, keys, rows, columns in sides:
        if kinds[0]:
            made[name] = mask(rows, columns, is_3d, kinds[0])
        if kinds[1]:
            made[keys] = padding(columns, kinds[1])
    return made


FAMILIES = {
    "bart": huggingface("BartForConditionalGeneration", "Bart", TEXT, True),
    "marian": huggingface("MarianMTModel", "Marian", TEXT, True),
    "mbart": huggingface("MBartForConditionalGeneration", "MBart", TEXT, True),
    "m2m100": huggingface("M2M100ForConditionalGeneration", "M2M100", TEXT, True),
    "pegasus": huggingface("PegasusForConditionalGeneration", "Pegasus", TEXT, True),
    "whisper": huggingface("WhisperForConditionalGeneration", "Whisper", SPEECH, True),
    "t5": huggingface("T5ForConditionalGeneration", "T5", T5, True, "float64", scale=1.5),
    "gated t5": huggingface("T5ForConditionalGeneration", "T5", GATED, True, "float64", scale=2.0),
    "bert": huggingface("BertForMaskedLM", "Bert", STACK, True, "generation"),
    "roberta": huggingface("RobertaForMaskedLM", "Roberta", STACK | dict(type_vocab_size=1), True, "generation"),
    "vit": huggingface("ViTForImageClassification", "ViT", IMAGE, True, "float64 tokens"),
    "gpt2": huggingface("GPT2LMHeadModel", "GPT2", GPT2, False, "one graph"),
    "llama": huggingface("LlamaForCausalLM", "Llama", GROUPED, False, "float64"),
    "mt5": huggingface("MT5ForConditionalGeneration", "MT5", T5, True, "float64", scale=1.5),
    "umt5": huggingface("UMT5ForConditionalGeneration", "UMT5", T5, True, "float64", scale=1.5),
    "t5gemma": huggingface("T5GemmaForConditionalGeneration", "T5Gemma", CAPPED, False, "float64 sdpa"),
    "blenderbot": huggingface("BlenderbotForConditionalGeneration", "Blenderbot", TEXT, True),
    "small blenderbot": huggingface("BlenderbotSmallForConditionalGeneration", "BlenderbotSmall", TEXT, True),
    "plbart": huggingface("PLBartForConditionalGeneration", "PLBart", TEXT, True),
    "speech2text": huggingface("Speech2TextForConditionalGeneration", "Speech2Text", FRAMES, True, "sdpa"),
    "seamless": huggingface("SeamlessM4TForTextToText", "SeamlessM4T", SEAMLESS, True),
    "seamless v2": huggingface("SeamlessM4Tv2ForTextToText", "SeamlessM4Tv2", SEAMLESS, True),
    "two berts": huggingface("EncoderDecoderModel", "EncoderDecoder", BERTS, True),
    "deit and bert": huggingface(
        "VisionEncoderDecoderModel", "VisionEncoderDecoder", CAPTION, True, "float64 compiled", scale=1.5
    ),
    "xlm-roberta": huggingface("XLMRobertaForMaskedLM", "XLMRoberta", STACK, True, "generation"),
    "camembert": huggingface("CamembertForMaskedLM", "Camembert", STACK, True, "generation"),
    "electra": huggingface("ElectraForMaskedLM", "Electra", STACK | dict(embedding_size=32), True, "generation"),
    "distilbert": huggingface("DistilBertForMaskedLM", "DistilBert", DISTIL, True, "generation"),
    "modernbert": huggingface("ModernBertForMaskedLM", "ModernBert", MODERN, False, "generation float64"),
    "deit": huggingface("DeiTForImageClassification", "DeiT", IMAGE, True, "float64 tokens"),
    "wav2vec2": huggingface("Wav2Vec2ForCTC", "Wav2Vec2", SOUND, True, LACKED),
    "stable wav2vec2": huggingface("Wav2Vec2ForCTC", "Wav2Vec2", STABLE, True, LACKED),
    "hubert": huggingface("HubertForCTC", "Hubert", SOUND, True, LACKED),
    "stable hubert": huggingface("HubertForCTC", "Hubert", STABLE, True, LACKED),
    "attention": torch_nn("attention"),
    "encoder layer": torch_nn("encoder layer", activation="gelu"),
    "decoder layer": torch_nn("decoder layer", norm_first=True),
    "encoder": torch_nn("encoder", norm_first=True),
    "decoder": torch_nn("decoder"),
    "transformer": torch_nn("transformer"),
}
HUGGINGFACE = [*FAMILIES][: [*FAMILIES].index("attention")]
TOKENS = [n for n in HUGGINGFACE if "tokens" not in FAMILIES[n].lacks]
GENERATING = [n for n in TOKENS if "generation" not in FAMILIES[n].lacks]
# One family of each kind of layer; the others are in the full tier alone.
EVERYDAY = "bart marian m2m100 whisper bert vit t5 gpt2 llama distilbert".split() + ["two berts", *KINDS]


def tiers(values: Any, *everyday: Any) -> list[Any]:
    """Parameters of which only these are in the everyday tier."""
    return [pytest.param(v, marks=() if v in everyday else pytest.mark.full, id=str(v)) for v in values]


@contextlib.contextmanager
def fast_path(enabled: bool) -> Iterator[None]:
    """Whether torch.nn's layers may use their fast path, in eval mode without gradients."""
    torch.backends.mha.set_fastpath_enabled(enabled)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


# Two copies of a model.


class Pair(NamedTuple):
    """theirs: the model untouched.   ours: the same, accelerated.   inputs, real: as Family.inputs gives them.

    is_whole: as in `solve`.     call: what is called in place of ours.
    """

    theirs: Any
    ours: Any
    report: Report
    inputs: dict[str, Any]
    real: Any
    tolerance: dict[str, float]
    is_whole: bool = True
    call: Callable[..., Any] | None = None

    def train(self, mode: bool = True) -> Pair:
        self.theirs.train(mode), self.ours.train(mode)
        return self

    def solve(self, model: nn.Module, grad: bool = True) -> Result:
        call = self.call if model is self.ours else None
        return solve(model, self.inputs, self.real, grad, call, self.is_whole)

    def compare(self, grad: bool = True) -> None:
        self.check(self.solve(self.ours, grad), self.solve(self.theirs, grad))

    def check(self, found: Result, expected: Result) -> None:
        check(found, expected, self.tolerance)

    def repeat(self, times: int) -> Pair:
        """The rows of the batch several times."""
        rows = len(next(t for n, t in self.inputs.items() if not n.endswith("mask")))

        def repeated(value: Any) -> Any:
            has_rows = isinstance(value, Tensor) and len(value) == rows
            return value.repeat(times, *[1] * (value.dim() - 1)) if has_rows else value

        inputs = {n: repeated(t) for n, t in self.inputs.items()}
        return self._replace(inputs=inputs, real=repeated(self.real))


def pair(name: str, **changes: Any) -> Pair:
    family = FAMILIES[name]
    theirs = family.build(**changes)
    ours = copy.deepcopy(theirs)
    inputs, real = family.inputs(theirs)
    if name in TOKENS:
        inputs["use_cache"] = False
    return Pair(theirs, ours, accelerate(ours), inputs, real, family.tolerance)


class Result(NamedTuple):
    outputs: list[Tensor]
    grads: dict[str, Tensor]


def kinds_of(model: nn.Module) -> list[type]:
    """The class of each module."""
    return [type(m) for m in model.modules()]


def outputs_of(model: Callable[..., Any], inputs: dict[str, Any]) -> list[Tensor]:
    out = model(**inputs)
    out = out.logits if hasattr(out, "logits") else out
    return [t for t in (out if isinstance(out, tuple) else (out,)) if t is not None]


def by_fastattn() -> contextlib.AbstractContextManager[None]:
    """Within it layers are whole, as on a GPU. On a CPU they call their modules unless a backend is requested."""
    return contextlib.nullcontext() if DEVICE == "cuda" else use_backend("aten")


def loss_of(output: Tensor) -> Tensor:
    rows = output.flatten(0, -2)
    return F.cross_entropy(rows, torch.arange(len(rows), device=rows.device) % rows.shape[1])


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def converted(inputs: dict[str, Any], convert: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """With other tensors in place of those of floating-point numbers."""
    floats = {id(t): t for t in inputs.values() if isinstance(t, Tensor) and t.is_floating_point()}
    made = {key: convert(t) for key, t in floats.items()}  # what was one tensor stays one
    return {n: made.get(id(t), t) for n, t in inputs.items()}


def solve(
    model: nn.Module,
    inputs: dict[str, Any],
    real: Any = ...,
    grad: bool = True,
    call: Callable[..., Any] | None = None,
    is_whole: bool = True,
) -> Result:
    """Outputs where they count, and the gradients of a loss over the first: of parameters and of inputs.

    call: what is called in place of the model.     is_whole: whether a forward with gradients is `by_fastattn`.
    """
    tensors = {n: t for n, t in inputs.items() if not n.endswith("mask")}
    tensors = converted(tensors, lambda t: t.detach().clone().requires_grad_(grad))
    model.zero_grad()
    with torch.set_grad_enabled(grad), by_fastattn() if grad and is_whole else contextlib.nullcontext():
        outputs = outputs_of(model if call is None else call, inputs | tensors)
        outputs[0] = outputs[0][real]
        if grad and outputs[0].requires_grad:
            loss_of(outputs[0]).backward()
    of_inputs = {n: t.grad for n, t in tensors.items() if isinstance(t, Tensor) and t.grad is not None}
    return Result([t.detach() for t in outputs], gradients(model) | of_inputs)


def check(found: Result, expected: Result, tolerance: dict[str, float]) -> None:
    assert len(found.outputs) == len(expected.outputs)
    for ours, theirs in zip(found.outputs, expected.outputs, strict=True):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, **tolerance)
    check_gradients(found.grads, expected.grads, 10 * tolerance["atol"])


def check_gradients(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-3) -> None:
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        assert (found[name] - grad).abs().max() <= tolerance * (grad.abs().max() + 1e-3), name


DROPOUTS = ("dropout", "attention_dropout", "activation_dropout")  # numbers, in some modules


def set_dropout(model: nn.Module, p: float) -> nn.Module:
    """Every dropout of the model, modules and numbers. No layer is skipped."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = p
        for name in DROPOUTS:
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, p)
        if hasattr(module, "layerdrop"):
            module.layerdrop = 0.0
    return model


# How a layer computes a call.


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers of every stack but those of convolutions, or the model where it is a layer."""
    stacks: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if type(module) is nn.ModuleList and not any(name.startswith(f"{outer}.") for outer in stacks):
            if not name.endswith("conv_layers"):
                stacks[name] = module
    return [child for stack in stacks.values() for child in stack.children()] or [model]


def ways(model: nn.Module, call: Callable[[], Any]) -> list[str]:
    """How each layer computed during a call: "whole" or "by modules".

    Python's profiler sees the calls, so that no module looks modified. A whole layer may call the linear maps of a
    memory, and the embedding of a bias by distance.
    """
    inside = {layer: {*layer.modules()} - {layer} for layer in layers_of(model)}
    found: list[str] = []
    last: set[nn.Module] = set()

    def note(frame: Any, event: str, _argument: Any) -> None:
        nonlocal last
        if event == "call" and frame.f_code is nn.Module._call_impl.__code__:
            module = frame.f_locals["self"]
            if module in inside:
                found.append("whole")
                last = inside[module]
            elif module in last and found[-1] == "whole" and not isinstance(module, (nn.Linear, nn.Embedding)):
                found[-1] = "by modules"

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return found
