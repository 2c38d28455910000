"""Other libraries' models: as they are, and after fastattn.accelerate.

    python benchmarks/report.py --only accelerate_inference accelerate_training

Models of transformers with random weights, and torch.nn's Transformer layers. accelerate_training: the step of
bench_transformer.py, with the default dropout of the library, and without. accelerate_inference: a forward under
inference_mode, and model.generate, whose tokens must equal those of the untouched model.

"default": accelerate(model), and for transformers' models report.loss. "default, own loss": the loss of the model
itself, from its logits. The rivals are the models as they are, with PyTorch's attention ("sdpa" in transformers), and
torch.compile of them. The reference is transformers' eager attention, and torch.nn itself.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import bench_transformer
import harness
import models
import torch
import torch.nn.functional as F
from bench_transformer import REDUCE_OVERHEAD
from cases import BEAMS, FORWARD, NEW_TOKENS, STATIC, AccelerateCase, ModelCase
from harness import Benchmark, Checked, Inputs, Provider, Run, Wrong
from result_files import CUDA_GRAPHS, GRAPHS, LOSS_FROM_LOGITS, UNTOUCHED
from torch import Tensor, nn

import fastattn

EOS = 1
SPECIAL = {"pad_token_id": models.PAD, "bos_token_id": 2, "eos_token_id": EOS}
SPECIAL_OF_PAIRS = {"decoder_start_token_id": models.PAD, "forced_eos_token_id": None}
SPECIAL_OF_PAIRS |= {"suppress_tokens": None, "begin_suppress_tokens": None}
IGNORED = -100
DROPOUTS = "dropout dropout_rate attention_dropout hidden_dropout_prob attention_probs_dropout_prob"
DROPOUTS += " resid_pdrop embd_pdrop attn_pdrop"
DROPOUT_P = 0.1  # the default of torch.nn
PATCH, MELS = 16, 80  # of ViT and of Whisper
EMBEDDING, WEIGHTS = 2.0, 0.7  # the scale of random embeddings, and of what other random weights make of inputs of 1
FAMILIES = {
    **{name: f"{name}ForConditionalGeneration" for name in ("M2M100", "Pegasus", "Whisper", "T5")},
    **{"Marian": "MarianMTModel", "BART": "BartForConditionalGeneration", "mBART": "MBartForConditionalGeneration"},
    **{"Llama": "LlamaForCausalLM", "GPT-2": "GPT2LMHeadModel", "BERT": "BertForMaskedLM"},
    **{"RoBERTa": "RobertaForMaskedLM", "ViT": "ViTForImageClassification"},
}
GENERATING = [name for name in FAMILIES if name not in ("BERT", "RoBERTa", "ViT")]


def image_side(case: ModelCase) -> int:
    """At least as many patches as the others have tokens."""
    return PATCH * math.ceil(case.length**0.5)


def config_options(case: ModelCase, is_pair: bool, longest: int) -> dict[str, Any]:
    """The sizes of a case by all names that configs of transformers have for them. One stack has as many layers as
    encoder and decoder together."""
    names = {
        "d_model hidden_size n_embd": case.d_model,
        "num_layers encoder_layers decoder_layers": case.n_layers,
        "num_hidden_layers n_layer": case.n_layers if is_pair else 2 * case.n_layers,
        "num_heads num_attention_heads encoder_attention_heads decoder_attention_heads n_head": case.n_head,
        "d_ff intermediate_size n_inner encoder_ffn_dim decoder_ffn_dim": case.d_inner,
        "max_position_embeddings max_target_positions n_positions": longest,
        "vocab_size": case.n_vocab,
        "encoder_layerdrop decoder_layerdrop": 0.0,
    }
    options = {name: value for given, value in names.items() for name in given.split()}
    options |= {"d_kv": case.d_model // case.n_head, "num_mel_bins": MELS}
    return options | {"max_source_positions": case.length, "patch_size": PATCH, "image_size": image_side(case)}


def transformers_model(name: str, case: ModelCase, dropout_p: float | None, longest: int) -> Any:
    """The model of a family in the shape of a case. dropout_p: None is the family's default."""
    transformers = harness.imported("transformers")
    transformers.logging.set_verbosity_error()
    kind = getattr(transformers, FAMILIES[name])
    known = kind.config_class()
    options = config_options(case, known.is_encoder_decoder, longest)
    if dropout_p is not None:
        options |= dict.fromkeys(DROPOUTS.split(), dropout_p)
    if name == "Llama":  # its feed-forward has three products for two
        options |= {"intermediate_size": 2 * case.d_inner // 3, "num_key_value_heads": max(1, case.n_head // 2)}
    if name == "ViT":  # others have a name for each label, which every generation copies
        options |= {"num_labels": case.n_vocab}
    options = {key: value for key, value in options.items() if hasattr(known, key)} | SPECIAL
    return kind(kind.config_class(**options | (SPECIAL_OF_PAIRS if known.is_encoder_decoder else {})))


class HuggingFace(nn.Module):
    """A model of transformers that reads as the public model does: logits (B * L, n_vocab) of src_seq and trg_seq.

    Without a decoder it reads trg_seq. Sound and images are in place of src_seq; ViT has logits (B, n_vocab).
    """

    def __init__(self, case: AccelerateCase, dropout_p: float | None, attention: str) -> None:
        super().__init__()
        # RoBERTa has positions from 1 on.
        self.model = transformers_model(case.model, case, dropout_p, case.length + case.new_tokens + 1)
        self.model.set_attn_implementation(attention)
        self.has_decoder = self.model.config.is_encoder_decoder
        if case.new_tokens:  # its own head: with the embedding's weight the next token is most often the last one
            self.model.get_output_embeddings().weight = nn.Parameter(torch.empty(case.n_vocab, case.d_model))

    def compile(self, **options: Any) -> None:
        """The model alone, since its own loss is that of a call of it."""
        self.model.compile(**options)

    def source(self, tokens: Tensor) -> dict[str, Tensor]:
        name = self.model.main_input_name
        if name != "input_ids":
            return {name: tokens.to(self.model.dtype)}
        return {name: tokens, "attention_mask": (tokens != models.PAD).long()}

    def batch(self, src_seq: Tensor, trg_seq: Tensor) -> dict[str, Tensor]:
        if self.has_decoder:
            return self.source(src_seq) | {"decoder_input_ids": trg_seq}
        return self.source(src_seq if src_seq.is_floating_point() else trg_seq)

    def forward(self, src_seq: Tensor, trg_seq: Tensor) -> Tensor:
        logits = self.model(**self.batch(src_seq, trg_seq)).logits
        return logits.reshape(-1, logits.shape[-1])

    def generate(self, call: str, src_seq: Tensor) -> Tensor:
        """The prompt of a model without an encoder is padded on the left."""
        source = self.source(src_seq if self.has_decoder else src_seq.flip(1))
        options = {"cache_implementation": "static"} if call.endswith(STATIC) else {}
        beams = 4 if call.startswith(BEAMS) else 1
        return self.model.generate(**source, num_beams=beams, do_sample=False, max_new_tokens=NEW_TOKENS, **options)

    @torch.no_grad()
    def spread_weights(self) -> None:
        """Random weights with which the next token depends on the source and on the tokens before, and EOS is never
        among the best."""
        torch.manual_seed(2)  # with which no family repeats one token
        head, embedding = self.model.get_output_embeddings().weight, self.model.get_input_embeddings().weight
        scale = head.shape[1] ** -0.5
        embedding_scale = EMBEDDING * (scale if getattr(self.model.config, "scale_embedding", False) else 1)
        for name, weight in self.model.named_parameters():
            if name.endswith("bias"):
                weight.normal_(0, 0.1)
            elif weight.dim() == 3:  # Whisper's convolutions, the embedding of sound
                weight.normal_(0, EMBEDDING * weight[0].numel() ** -0.5)
            elif weight.dim() == 2 and weight.requires_grad and "position" not in name and "wpe" not in name:
                weight.normal_(0, embedding_scale if weight is embedding else WEIGHTS * scale)
        head[[EOS, models.PAD]] = 0.0


def own_loss(model: nn.Module, src_seq: Tensor, trg_seq: Tensor, gold: Tensor, report: Any = None) -> Tensor:
    """The loss of the model itself, or of accelerate's report in its place. torch.nn has none."""
    if not isinstance(model, HuggingFace):
        return models.plain_loss(model, src_seq, trg_seq, gold)
    batch = model.batch(src_seq, trg_seq) | {"labels": gold.masked_fill(gold == models.PAD, IGNORED)}
    if report is not None:
        return report.loss(model.model, **batch)
    output = model.model(**batch)
    if output.logits.dtype is torch.float64 and output.loss.dtype is torch.float32:
        # The loss of causal models rounds logits to float32. The reference has to be exact.
        labels = batch["labels"][:, 1:]
        return F.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
    return output.loss


def report_loss(model: nn.Module, *batch: Tensor) -> Tensor:
    return own_loss(model, *batch, report=model.report)


def build(case: AccelerateCase, dropout_p: float | None, longest: int, attention: str = "sdpa") -> nn.Module:
    if case.model == "nn.Transformer":
        return models.TorchTransformer(case, DROPOUT_P if dropout_p is None else dropout_p, longest)
    return HuggingFace(case, dropout_p, attention)


def accelerated(case: AccelerateCase, dropout_p: float | None, longest: int, graphs: bool = False) -> nn.Module:
    model = build(case, dropout_p, longest)
    model.report = fastattn.accelerate(model, graphs=graphs)
    return model


def make_inputs(case: AccelerateCase, device: torch.device) -> Inputs:
    inputs = models.make_inputs(case, device, longest=case.length)
    dtype = case.dtype if case.op == "accelerate_inference" else torch.float32
    torch.manual_seed(harness.SEED)
    model = build(case, 0.0, case.length, "eager").to(device)
    if case.new_tokens:
        model.spread_weights()
    inputs = inputs._replace(leaves=dict(model.state_dict()))
    shapes = {"Whisper": (MELS, 2 * case.length), "ViT": (3, image_side(case), image_side(case))}
    if case.model in shapes:
        shape = case.batch, *shapes[case.model]
        inputs.fixed["src_seq"] = torch.randn(shape, generator=harness.seeded(device), device=device, dtype=dtype)
    if case.model == "ViT":
        inputs.fixed["trg_seq"] = inputs.fixed["trg_seq"][:, :2]  # one label for each image
    return inputs.changed(lambda t: t.to(dtype) if t.is_floating_point() else t)


def run(model: nn.Module, case: AccelerateCase, inputs: Inputs, *given: Any, **notes: Any) -> Run:
    """A step, or a call."""
    if case.op == "accelerate_training":
        return bench_transformer.step_run(model, case, inputs, *given, **notes)
    src_seq, trg_seq = inputs.fixed["src_seq"], inputs.fixed["trg_seq"]
    model.eval()

    @torch.inference_mode()
    def call() -> Tensor:
        return model(src_seq, trg_seq[:, :-1]) if case.call == FORWARD else model.generate(case.call, src_seq)

    def results() -> dict[str, Tensor]:
        if case.new_tokens:
            return {"tokens": call()}
        return {"logits": call()[trg_seq[:, 1:].flatten() != models.PAD]}  # those of padding are undefined

    return Run(results, {"call": call}, notes)


provider = functools.partial(bench_transformer.provider, compute_loss=own_loss, run=run)
DEFAULT = provider("default", accelerated, compute_loss=report_loss, default=True)
AS_IT_IS = provider(UNTOUCHED, build, ours=False)


def training_providers(device: torch.device) -> list[Provider]:
    compiled = functools.partial(provider, later=25 if device.type == "cuda" else 1000)
    graphed = functools.partial(accelerated, graphs=True)
    return [
        provider("reference", functools.partial(build, attention="eager")),
        DEFAULT,
        provider(LOSS_FROM_LOGITS, accelerated),
        provider(GRAPHS, graphed, compute_loss=report_loss, graphs=True),
        compiled("default, compiled", accelerated, compiled="default"),
        AS_IT_IS,
        compiled("torch.compile of it", build, ours=False, compiled="default"),
        compiled(f"torch.compile of it{CUDA_GRAPHS}", build, ours=False, compiled=REDUCE_OVERHEAD),
    ]


def check_call(checked: Checked, provider: Provider) -> float | None:
    """Tokens are compared in float32, since two may be equally likely in bfloat16."""
    if provider.name == UNTOUCHED:
        return None
    if not checked.case.new_tokens:
        return checked.error_over_bound(provider)
    inputs = checked.inputs.changed(lambda t: t.float() if t.is_floating_point() else t)
    ours, theirs = (p.make(checked.case, inputs, 0.0).results()["tokens"] for p in (provider, checked.providers[0]))
    if not torch.equal(ours, theirs):
        raise Wrong("other tokens than those of the untouched model")
    return 0.0


_OF_CALLS = (
    "d256: 3+3 layers, 4 heads; d512: 6+6 layers, 8 heads; 8000 words; a model without encoder or decoder has all "
    f"layers in one stack; a quarter of several sentences is padding; `generate` makes {NEW_TOKENS} tokens of each"
)
_CALL, _STEP = ({"directions": (name,), "hide_host": False} for name in ("call", "step"))
_UNTOUCHED_AND_DEFAULT = lambda device: [AS_IT_IS, DEFAULT]  # noqa: E731
BENCHMARKS = (
    Benchmark("accelerate_inference", _OF_CALLS, (), make_inputs, _UNTOUCHED_AND_DEFAULT, check=check_call, **_CALL),
    Benchmark("accelerate_training", _OF_CALLS, (), make_inputs, training_providers, **_STEP),
)
