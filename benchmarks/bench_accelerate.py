"""One whole training step of other libraries' models: as they are, and after fastattn.accelerate.

    python benchmarks/report.py --only accelerate

Models of transformers with random weights, and torch.nn's Transformer layers. Forward, loss, backward and fused Adam;
bfloat16 cases are float32 parameters under torch.autocast. The batch's lengths are even from half of the longest to the
longest, so a quarter of it is padding. Dropout is 0.1 everywhere; Marian and BART are timed also without that of
attention weights, as their own configs set it. Logits, loss and gradients are compared without dropout, as in
bench_transformer.py.

"default": accelerate(model), and for transformers' models report.loss. "default, own loss": the loss of the model
itself, from its logits. The rivals are the models as they are, with PyTorch's attention ("sdpa" in transformers), and
the same under torch.compile. The reference is transformers' eager attention, and torch.nn itself.
"""

from __future__ import annotations

from typing import Any

import bench_transformer
import harness
import models
import torch
from cases import AccelerateCase
from harness import Inputs, Provider, Refused, Run
from result_files import LOSS_FROM_LOGITS
from torch import Tensor, nn

import fastattn

SPECIAL = {"pad_token_id": models.PAD, "bos_token_id": 2, "eos_token_id": 1}
IGNORED = -100


def _pair(case: AccelerateCase, dropout_p: float) -> dict[str, Any]:
    sizes = {"layers": case.n_layers, "attention_heads": case.n_head, "ffn_dim": case.d_inner}
    options = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in sizes.items()}
    options |= {"dropout": dropout_p, "attention_dropout": min(dropout_p, case.attention_dropout_p)}
    options |= {"d_model": case.d_model, "max_position_embeddings": case.length}
    return options | {"decoder_start_token_id": models.PAD, "forced_eos_token_id": None}


def _t5(case: AccelerateCase, dropout_p: float) -> dict[str, Any]:
    options = {"d_model": case.d_model, "d_kv": case.d_model // case.n_head, "d_ff": case.d_inner}
    options |= {"num_layers": case.n_layers, "num_heads": case.n_head, "dropout_rate": dropout_p}
    return options | {"decoder_start_token_id": models.PAD}


def _bert(case: AccelerateCase, dropout_p: float) -> dict[str, Any]:
    """As many layers as the others have in encoder and decoder together."""
    options = {"hidden_size": case.d_model, "num_hidden_layers": 2 * case.n_layers, "num_attention_heads": case.n_head}
    options |= {"intermediate_size": case.d_inner, "max_position_embeddings": case.length}
    return options | {"hidden_dropout_prob": dropout_p, "attention_probs_dropout_prob": dropout_p}


# Name of a case's model -> the names of its classes, and the arguments of its config.
TRANSFORMERS = {
    "Marian": ("MarianMTModel", "MarianConfig", _pair),
    "BART": ("BartForConditionalGeneration", "BartConfig", _pair),
    "T5": ("T5ForConditionalGeneration", "T5Config", _t5),
    "BERT": ("BertForMaskedLM", "BertConfig", _bert),
}


class HuggingFace(nn.Module):
    """A model of transformers that reads as the public model does: logits (B * L, n_vocab) of src_seq and trg_seq.

    BERT, without a decoder, reads trg_seq.
    """

    def __init__(self, case: AccelerateCase, dropout_p: float, attention: str) -> None:
        super().__init__()
        try:
            import transformers
        except ImportError as error:
            raise Refused("transformers is not installed") from error
        kind, config, arguments = TRANSFORMERS[case.model]
        options = SPECIAL | {"vocab_size": case.n_vocab} | arguments(case, dropout_p)
        self.model = getattr(transformers, kind)(getattr(transformers, config)(**options))
        self.model.set_attn_implementation(attention)
        self.has_decoder = self.model.config.is_encoder_decoder

    def batch(self, src_seq: Tensor, trg_seq: Tensor) -> dict[str, Tensor]:
        source = src_seq if self.has_decoder else trg_seq
        batch = {"input_ids": source, "attention_mask": (source != models.PAD).long()}
        return batch | ({"decoder_input_ids": trg_seq} if self.has_decoder else {})

    def forward(self, src_seq: Tensor, trg_seq: Tensor) -> Tensor:
        return self.model(**self.batch(src_seq, trg_seq)).logits.flatten(0, 1)


def own_loss(wrapped: HuggingFace, src_seq: Tensor, trg_seq: Tensor, gold: Tensor) -> Tensor:
    labels = gold.masked_fill(gold == models.PAD, IGNORED)
    return wrapped.model(**wrapped.batch(src_seq, trg_seq), labels=labels).loss


def build(case: AccelerateCase, dropout_p: float, attention: str) -> nn.Module:
    if case.model == "nn.Transformer":
        return models.TorchTransformer(case, dropout_p, case.length)
    return HuggingFace(case, dropout_p, attention)


def make_inputs(case: AccelerateCase, device: torch.device) -> Inputs:
    inputs = models.make_inputs(case, device, longest=case.length)
    if case.model == "nn.Transformer":
        return inputs
    torch.manual_seed(harness.SEED)
    return inputs._replace(leaves=dict(build(case, 0.0, "eager").to(device).state_dict()))


def provider(
    name: str, attention: str = "sdpa", accelerated: bool = False, without_logits: bool = False, **options: Any
) -> Provider:
    """without_logits: the loss is that of accelerate's report. options: compiled, as in bench_transformer; later."""
    compiled, later = options.pop("compiled", False), options.pop("later", 0)

    def make(case: AccelerateCase, inputs: Inputs, dropout_p: float) -> Run:
        model = build(case, dropout_p, attention)
        model = model.to(inputs.fixed["src_seq"].device, next(iter(inputs.leaves.values())).dtype)
        model.load_state_dict(inputs.leaves)
        loss: Any = models.plain_loss if case.model == "nn.Transformer" else own_loss
        if accelerated:
            report = fastattn.accelerate(model)
            if without_logits and case.model != "nn.Transformer":

                def loss(wrapped: HuggingFace, src_seq: Tensor, trg_seq: Tensor, gold: Tensor) -> Tensor:
                    labels = gold.masked_fill(gold == models.PAD, IGNORED)
                    return report.loss(wrapped.model, **wrapped.batch(src_seq, trg_seq), labels=labels)

        if compiled:
            torch._dynamo.reset()
            model.compile(dynamic=False)
        return bench_transformer.step_run(model, case, inputs, loss, None, **options)

    return Provider(name, make, ours=accelerated or attention == "eager", later=later)


def providers(device: torch.device) -> list[Provider]:
    on_gpu = device.type == "cuda"
    return [
        provider("reference", "eager", later=harness.SELDOM * on_gpu),
        provider("default", accelerated=True, without_logits=True, default=True),
        provider(LOSS_FROM_LOGITS, accelerated=True),
        provider("as it is"),
        provider("torch.compile of it", compiled=True, later=18 if on_gpu else 100),
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
