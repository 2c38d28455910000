"""Other libraries' models: as they are, and after fastattn.accelerate.

    python benchmarks/report.py --only accelerate                                    one training step, with dropout 0.1
    python benchmarks/report.py --only accelerate_inference accelerate_training      what users do, every family

Models of transformers with random weights, and torch.nn's Transformer layers. The batch's lengths are even from half of
the longest to the longest, so a quarter of it is padding; a single sentence has none. A training step: forward, loss,
backward and fused Adam; bfloat16 cases are float32 parameters under torch.autocast. Logits, loss and gradients are
compared without dropout, as in bench_transformer.py.

"default": accelerate(model), and for transformers' models report.loss. "default, own loss": the loss of the model
itself, from its logits. The rivals are the models as they are, with PyTorch's attention ("sdpa" in transformers).

accelerate: dropout is 0.1 everywhere; Marian and BART are timed also without that of attention weights, as their own
configs set it. A further rival is torch.compile. The reference is transformers' eager attention, and torch.nn itself.

accelerate_inference: a forward under inference_mode, and model.generate, in eval mode; the whole model is in the case's
dtype. accelerate_training: a step with the default dropout of the library, and without dropout; LayerDrop is always 0.
The reference is the model as it is. Generated tokens must equal its tokens. That is checked in float32, since two
tokens may be equally likely in bfloat16. Samples of all providers of a case alternate.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import bench_transformer
import harness
import models
import timing
import torch
import torch.nn.functional as F
from bench_transformer import REDUCE_OVERHEAD, needs_gpu
from cases import BEAMS, STATIC, AccelerateCase, CallCase, OwnDropoutCase
from harness import Checked, Inputs, Provider, Refused, Run
from result_files import CUDA_GRAPHS, GRAPHS, LOSS_FROM_LOGITS, UNTOUCHED
from torch import Tensor, nn

import fastattn

SPECIAL = {"pad_token_id": models.PAD, "bos_token_id": 2, "eos_token_id": 1}
IGNORED = -100
DROPOUT_P = 0.1  # the default of torch.nn
PATCH, MELS = 16, 80  # of ViT and of Whisper
EMBEDDING, WEIGHTS = 2.0, 0.7  # the scale of random embeddings, and of what other random weights make of inputs of 1
SAMPLES = 3  # times the time for an op's samples: ratios near 1 need more of them


def _dropout(p: float | None, *names: str) -> dict[str, float]:
    return {} if p is None else dict.fromkeys(names, p)


def _longest(case: AccelerateCase) -> int:
    return case.length + case.new_tokens


def _pair(case: AccelerateCase, dropout_p: float | None) -> dict[str, Any]:
    sizes = {"layers": case.n_layers, "attention_heads": case.n_head, "ffn_dim": case.d_inner, "layerdrop": 0.0}
    options = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in sizes.items()}
    options |= _dropout(dropout_p, "dropout")
    options |= _dropout(dropout_p and min(dropout_p, case.attention_dropout_p), "attention_dropout")
    options |= {"d_model": case.d_model, "max_position_embeddings": _longest(case)}
    return options | {"decoder_start_token_id": models.PAD, "forced_eos_token_id": None}


def _whisper(case: AccelerateCase, dropout_p: float | None) -> dict[str, Any]:
    options = _pair(case, dropout_p)
    options |= {"max_source_positions": case.length, "max_target_positions": options.pop("max_position_embeddings")}
    return options | {"num_mel_bins": MELS, "suppress_tokens": None, "begin_suppress_tokens": None}


def _t5(case: AccelerateCase, dropout_p: float | None) -> dict[str, Any]:
    options = {"d_model": case.d_model, "d_kv": case.d_model // case.n_head, "d_ff": case.d_inner}
    options |= {"num_layers": case.n_layers, "num_heads": case.n_head, "decoder_start_token_id": models.PAD}
    return options | _dropout(dropout_p, "dropout_rate")


def _stack(case: AccelerateCase) -> dict[str, Any]:
    """As many layers as the others have in encoder and decoder together."""
    options = {"hidden_size": case.d_model, "num_hidden_layers": 2 * case.n_layers, "num_attention_heads": case.n_head}
    return options | {"intermediate_size": case.d_inner}


def _bert(case: AccelerateCase, dropout_p: float | None) -> dict[str, Any]:
    """RoBERTa has positions from 1 on."""
    dropout = _dropout(dropout_p, "hidden_dropout_prob", "attention_probs_dropout_prob")
    return _stack(case) | dropout | {"max_position_embeddings": case.length + (case.model == "RoBERTa")}


def _vit(case: AccelerateCase, dropout_p: float | None) -> dict[str, Any]:
    """At least as many patches as the others have tokens, and as many classes as they have words."""
    options = _stack(case) | _dropout(dropout_p, "hidden_dropout_prob", "attention_probs_dropout_prob")
    return options | {"image_size": _side(case), "patch_size": PATCH, "num_labels": case.n_vocab}


def _side(case: AccelerateCase) -> int:
    return PATCH * math.ceil(case.length**0.5)


def _llama(case: AccelerateCase, dropout_p: float | None) -> dict[str, Any]:
    """Its feed-forward has three products for two."""
    options = _stack(case) | _dropout(dropout_p, "attention_dropout")
    options |= {"intermediate_size": 2 * case.d_inner // 3, "num_key_value_heads": max(1, case.n_head // 2)}
    return options | {"max_position_embeddings": _longest(case)}


def _gpt2(case: AccelerateCase, dropout_p: float | None) -> dict[str, Any]:
    options = {"n_embd": case.d_model, "n_layer": 2 * case.n_layers, "n_head": case.n_head, "n_inner": case.d_inner}
    return options | {"n_positions": _longest(case)} | _dropout(dropout_p, "resid_pdrop", "embd_pdrop", "attn_pdrop")


# Name of a case's model -> the names of its classes, and the arguments of its config.
TRANSFORMERS = {
    "Marian": ("MarianMTModel", "MarianConfig", _pair),
    "BART": ("BartForConditionalGeneration", "BartConfig", _pair),
    "mBART": ("MBartForConditionalGeneration", "MBartConfig", _pair),
    "M2M100": ("M2M100ForConditionalGeneration", "M2M100Config", _pair),
    "Pegasus": ("PegasusForConditionalGeneration", "PegasusConfig", _pair),
    "Whisper": ("WhisperForConditionalGeneration", "WhisperConfig", _whisper),
    "T5": ("T5ForConditionalGeneration", "T5Config", _t5),
    "BERT": ("BertForMaskedLM", "BertConfig", _bert),
    "RoBERTa": ("RobertaForMaskedLM", "RobertaConfig", _bert),
    "ViT": ("ViTForImageClassification", "ViTConfig", _vit),
    "Llama": ("LlamaForCausalLM", "LlamaConfig", _llama),
    "GPT-2": ("GPT2LMHeadModel", "GPT2Config", _gpt2),
}


class HuggingFace(nn.Module):
    """A model of transformers that reads as the public model does: logits (B * L, n_vocab) of src_seq and trg_seq.

    Without a decoder it reads trg_seq. Sound and images are in place of src_seq; ViT has logits (B, n_vocab).
    """

    def __init__(self, case: AccelerateCase, dropout_p: float | None, attention: str) -> None:
        super().__init__()
        try:
            import transformers
        except ImportError as error:
            raise Refused("transformers is not installed") from error
        transformers.logging.set_verbosity_error()
        kind, config, arguments = TRANSFORMERS[case.model]
        options = SPECIAL | {"vocab_size": case.n_vocab} | arguments(case, dropout_p)
        self.model = getattr(transformers, kind)(getattr(transformers, config)(**options))
        self.model.set_attn_implementation(attention)
        self.has_decoder = self.model.config.is_encoder_decoder
        if case.new_tokens:  # a head of its own: with the embedding's weight the next token is most often the last one
            self.model.get_output_embeddings().weight = nn.Parameter(torch.empty(case.n_vocab, case.d_model))

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

    def generate(self, case: CallCase, src_seq: Tensor) -> Tensor:
        """The prompt of a model without an encoder is padded on the left."""
        source = self.source(src_seq if self.has_decoder else src_seq.flip(1))
        options = {"cache_implementation": "static"} if case.call.endswith(STATIC) else {}
        beams = 4 if case.call.startswith(BEAMS) else 1
        return self.model.generate(
            **source, num_beams=beams, do_sample=False, max_new_tokens=case.new_tokens, **options
        )

    @torch.no_grad()
    def spread_weights(self) -> None:
        """Random weights with which the next token depends on the source and on the tokens before, and EOS is never
        among the best."""
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
        head[[SPECIAL["eos_token_id"], models.PAD]] = 0.0


def own_loss(wrapped: HuggingFace, src_seq: Tensor, trg_seq: Tensor, gold: Tensor) -> Tensor:
    labels = gold.masked_fill(gold == models.PAD, IGNORED)
    output = wrapped.model(**wrapped.batch(src_seq, trg_seq), labels=labels)
    if output.logits.dtype is torch.float64 and output.loss.dtype is torch.float32:
        # The loss of causal models rounds logits to float32. The reference has to be exact.
        return F.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
    return output.loss


def build(case: AccelerateCase, dropout_p: float | None, attention: str) -> nn.Module:
    if case.model == "nn.Transformer":
        return models.TorchTransformer(case, DROPOUT_P if dropout_p is None else dropout_p, case.length)
    return HuggingFace(case, dropout_p, attention)


def make_inputs(case: AccelerateCase, device: torch.device) -> Inputs:
    inputs = models.make_inputs(case, device, longest=case.length)
    dtype = case.dtype if isinstance(case, CallCase) else torch.float32
    if case.model != "nn.Transformer":
        torch.manual_seed(harness.SEED)
        model = build(case, 0.0, "eager").to(device)
        if case.new_tokens:
            model.spread_weights()
        inputs = inputs._replace(leaves=dict(model.state_dict()))
    shapes = {"Whisper": (MELS, 2 * case.length), "ViT": (3, _side(case), _side(case))}
    if case.model in shapes:
        inputs.fixed["src_seq"] = harness.seeded_randn(device, dtype)(case.batch, *shapes[case.model])
    if case.model == "ViT":
        inputs.fixed["trg_seq"] = inputs.fixed["trg_seq"][:, :2]  # one label for each image
    return inputs.changed(lambda t: t.to(dtype) if t.is_floating_point() else t)


def provider(
    name: str, attention: str = "sdpa", accelerated: bool = False, without_logits: bool = False, **options: Any
) -> Provider:
    """without_logits: the loss is that of accelerate's report. options: compiled and graphs, as in bench_transformer;
    later."""
    compiled, later = options.pop("compiled", None), options.pop("later", 0)

    def make(case: AccelerateCase, inputs: Inputs, dropout_p: float) -> Run:
        if options.get("graphs") or compiled == REDUCE_OVERHEAD:
            needs_gpu(inputs.fixed["src_seq"].device)
        model = build(case, dropout_p, attention)
        model = model.to(inputs.fixed["src_seq"].device, next(iter(inputs.leaves.values())).dtype)
        model.load_state_dict(inputs.leaves)
        loss: Any = models.plain_loss if case.model == "nn.Transformer" else own_loss
        if accelerated:
            report = fastattn.accelerate(model, graphs=options.get("graphs"))
            if without_logits and case.model != "nn.Transformer":

                def loss(wrapped: HuggingFace, src_seq: Tensor, trg_seq: Tensor, gold: Tensor) -> Tensor:
                    labels = gold.masked_fill(gold == models.PAD, IGNORED)
                    return report.loss(wrapped.model, **wrapped.batch(src_seq, trg_seq), labels=labels)

        if compiled:
            torch._dynamo.reset()
            model.compile(dynamic=False, mode=compiled)
        if isinstance(case, CallCase):
            return call_run(model.eval(), case, inputs, **options)
        return bench_transformer.step_run(model, case, inputs, loss, None, **options)

    return Provider(name, make, ours=accelerated or attention == "eager", later=later)


def call_run(model: nn.Module, case: CallCase, inputs: Inputs, **notes: Any) -> Run:
    src_seq, trg_seq = inputs.fixed["src_seq"], inputs.fixed["trg_seq"]

    @torch.inference_mode()
    def forward() -> Tensor:
        return model(src_seq, trg_seq[:, :-1])

    def generate() -> Tensor:
        return model.generate(case, src_seq)

    def results() -> dict[str, Tensor]:
        if case.new_tokens:
            return {"tokens": generate()}
        return {"logits": forward()[trg_seq[:, 1:].flatten() != models.PAD]}  # those of padding are undefined

    return Run(results, {"call": generate if case.new_tokens else forward}, notes)


def providers(device: torch.device) -> list[Provider]:
    seldom, later = (harness.SELDOM, 18) if device.type == "cuda" else (0, 100)
    return [
        provider("reference", "eager", later=seldom),
        provider("default", accelerated=True, without_logits=True, default=True),
        provider(LOSS_FROM_LOGITS, accelerated=True),
        provider(GRAPHS, accelerated=True, without_logits=True, graphs=True),
        provider(UNTOUCHED),
        provider("torch.compile of it", compiled="default", later=later),
        provider(f"torch.compile of it{CUDA_GRAPHS}", compiled=REDUCE_OVERHEAD, later=later),
    ]


BENCHMARK = harness.Benchmark(
    name="accelerate",
    case_type=AccelerateCase,
    rates=("token",),
    inputs=make_inputs,
    providers=providers,
    directions=("step",),
    hide_host=False,
)


def untouched_and_default(device: torch.device) -> list[Provider]:
    return [provider(UNTOUCHED), provider("default", accelerated=True, without_logits=True, default=True)]


def training_providers(device: torch.device) -> list[Provider]:
    return [*untouched_and_default(device), provider(LOSS_FROM_LOGITS, accelerated=True)]


def measure(checked: Checked, provider: Provider, budget_s: float) -> dict[str, Any]:
    return _measured(checked, budget_s)[provider.name]


@functools.lru_cache(maxsize=1)
def _measured(checked: Checked, budget_s: float) -> dict[str, dict[str, Any]]:
    """The rows of all providers of a case: each is checked, then all are timed together."""
    runs: dict[str, Run] = {}
    rows = {
        given.name: harness.outcome(functools.partial(_prepared, checked, given, runs)) for given in checked.providers
    }
    (direction,) = checked.benchmark.directions
    calls = {name: run.timed[direction] for name, run in runs.items()}
    timings = timing.measure_in_turn(list(calls.values()), checked.device, SAMPLES * budget_s, hide_host=False)
    for (name, call), timed in zip(calls.items(), timings, strict=True):
        memory = timing.peak_mib(call, checked.device) if isinstance(checked.case, OwnDropoutCase) else None
        rows[name] |= {"timings": {direction: timed._asdict()}, "peak_mib": memory} | runs[name].notes
    return rows


def _prepared(checked: Checked, provider: Provider, runs: dict[str, Run]) -> dict[str, Any]:
    """The row without its figures. If the results are right, what is timed is put into `runs`."""
    row: dict[str, Any] = {"status": "ok", "error_over_bound": None}
    if provider.name != UNTOUCHED and checked.case.new_tokens:
        if not torch.equal(_tokens(checked, provider), _tokens(checked, checked.providers[0])):
            return {"status": "wrong result", "reason": "other tokens than those of the untouched model"}
    elif provider.name != UNTOUCHED:
        row["error_over_bound"] = error = checked.error_over_bound(provider)
        if not error <= 1:
            return {"status": "wrong result", "reason": f"error is {error:.3g} x its bound"}
    runs[provider.name] = provider.make(checked.case, checked.inputs, checked.case.dropout_p)
    return row


def _tokens(checked: Checked, provider: Provider) -> Tensor:
    inputs = checked.inputs.changed(lambda t: t.float() if t.is_floating_point() else t)
    return provider.make(checked.case, inputs, 0.0).results()["tokens"]


INFERENCE = harness.Benchmark(
    name="accelerate_inference",
    case_type=CallCase,
    rates=(),
    inputs=make_inputs,
    providers=untouched_and_default,
    directions=("call",),
    measure=measure,
)
_TRAINING = {"case_type": OwnDropoutCase, "providers": training_providers, "directions": ("step",)}
TRAINING = dataclasses.replace(INFERENCE, name="accelerate_training", **_TRAINING)
