"""Translation with the whole encoder-decoder, greedy and by beam search, against what a user would pick instead.

    pytest benchmarks/bench_decoding.py --benchmark-only            the quick cases
    python benchmarks/report.py --out DIR --only decoding

Every sentence gets the same number of tokens, whatever is predicted. tokens/s counts those of the best translations.
What is compared are the logits of the next token at every step of a prefix that is given. Hugging Face's Marian and
CTranslate2 have the same shape, but random weights of their own: only their speed is compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import harness
import marian
import models
import torch
from cases import DecodingCase, label
from harness import Inputs, Provider, Refused, Run
from tables import cases_of
from torch import Tensor, nn

from fastattn import AttentionMask, generate, get_pad_mask, get_subsequent_mask, use_backend

BOS = 2
NEVER = -1  # as the index of EOS: no sentence ends
MOST_ROWS = 64  # sentences times beams that are decoded without a cache; more take minutes


def make_inputs(case: DecodingCase, device: torch.device) -> Inputs:
    inputs = models.make_inputs(case, device, _positions(case))
    generator = torch.Generator().manual_seed(harness.SEED)
    prefix = torch.randint(1, case.n_vocab, (case.batch, case.new_tokens), generator=generator).to(device)
    leaves = {name: weight.to(case.dtype) for name, weight in inputs.leaves.items()}
    return Inputs(leaves, {"src_seq": inputs.fixed["src_seq"], "prefix": prefix})


def _positions(case: DecodingCase) -> int:
    return max(case.length, case.new_tokens + 1)


def _load(build: models.Build, case: DecodingCase, inputs: Inputs) -> nn.Module:
    weights, src_seq = inputs.leaves, inputs.fixed["src_seq"]
    model = build(case, 0.0, _positions(case)).to(src_seq.device, next(iter(weights.values())).dtype).eval()
    model.load_state_dict(weights)
    return model


def _generate(model: nn.Module, src_seq: Tensor, case: DecodingCase) -> Any:
    limits = {"max_len": case.new_tokens, "bos_idx": BOS, "eos_idx": NEVER}
    if case.beam == 1:
        return generate.greedy(model, src_seq, **limits)
    return generate.beam_search(model, src_seq, beam_size=case.beam, **limits)


def incremental(name: str, backend: str | None, **notes: Any) -> Provider:
    """fastattn.generate on FusedTransformer."""

    def make(case: DecodingCase, inputs: Inputs, dropout_p: float) -> Run:
        model, src_seq, prefix = _load(models.fused, case, inputs), inputs.fixed["src_seq"], inputs.fixed["prefix"]

        @torch.no_grad()
        def results() -> dict[str, Tensor]:
            with use_backend(backend):
                cache = model.start_decoding(src_seq, 1, case.new_tokens)
                return {"logits": torch.stack([model.next_logits(token[:, None], cache)[:, 0] for token in prefix.T])}

        def decode() -> Any:
            with use_backend(backend):
                return _generate(model, src_seq, case)

        return Run(results, {"decode": decode}, notes)

    return Provider(name, make)


Masks = tuple[Any, Callable[[Tensor], Any]]  # of the source, and of a prefix by its tokens


def fused_masks(model: nn.Module, src_seq: Tensor) -> Masks:
    return model.src_mask(src_seq), lambda tokens: AttentionMask(is_causal=True)


def plain_masks(model: nn.Module, src_seq: Tensor) -> Masks:
    return get_pad_mask(src_seq, models.PAD), get_subsequent_mask


def without_cache(
    name: str, build: models.Build, masks: Callable[[nn.Module, Tensor], Masks], **notes: Any
) -> Provider:
    """The whole prefix decoded at each step: greedily the batch at once, with beams sentence by sentence, as the public
    implementation's Translator does it."""

    def make(case: DecodingCase, inputs: Inputs, dropout_p: float) -> Run:
        if case.batch * case.beam > MOST_ROWS:
            raise Refused(f"without a cache {case.batch} sentences with {case.beam} beams take minutes")
        model, src_seq, prefix = _load(build, case, inputs), inputs.fixed["src_seq"], inputs.fixed["prefix"]
        scale = case.d_model**-0.5  # of the logits; both models share the projection with the embedding

        def logits(tokens: Tensor, encoded: Tensor, of: Masks) -> Tensor:
            decoded, *_ = model.decoder(tokens, of[1](tokens), encoded, of[0])
            return model.trg_word_prj(decoded[:, -1]) * scale

        @torch.no_grad()
        def results() -> dict[str, Tensor]:
            of = masks(model, src_seq)
            encoded, *_ = model.encoder(src_seq, of[0])
            return {"logits": torch.stack([logits(prefix[:, : t + 1], encoded, of) for t in range(case.new_tokens)])}

        def greedy() -> Tensor:
            of = masks(model, src_seq)
            encoded, *_ = model.encoder(src_seq, of[0])
            tokens = torch.full_like(src_seq[:, :1], BOS)
            for _ in range(case.new_tokens):
                tokens = torch.cat([tokens, logits(tokens, encoded, of).argmax(-1, keepdim=True)], 1)
            return tokens

        def beams(sentence: Tensor) -> Tensor:
            of = masks(model, sentence)
            encoded, *_ = model.encoder(sentence, of[0])
            of, encoded = masks(model, sentence.expand(case.beam, -1)), encoded.expand(case.beam, -1, -1)
            tokens = sentence.new_full((case.beam, 1), BOS)
            log_p = torch.full((case.beam, 1), -torch.inf, device=sentence.device)
            log_p[0] = 0
            for _ in range(case.new_tokens):
                sums = log_p + logits(tokens, encoded, of).float().log_softmax(-1)
                best, place = sums.flatten().topk(case.beam)
                log_p, classes = best[:, None], sums.shape[1]
                tokens = torch.cat([tokens[place // classes], (place % classes)[:, None]], 1)
            return tokens[0]

        @torch.no_grad()
        def decode() -> Any:
            return greedy() if case.beam == 1 else [beams(sentence[None]) for sentence in src_seq]

        return Run(results, {"decode": decode}, notes)

    return Provider(name, make, ours=build is models.fused)


def _words(src_seq: Tensor) -> list[list[int]]:
    return [[word for word in sentence if word != models.PAD] for sentence in src_seq.tolist()]


def hugging_face(case: DecodingCase, inputs: Inputs, dropout_p: float) -> Run:
    harness.imported("transformers")
    src_seq = inputs.fixed["src_seq"]
    model = marian.build(case).to(src_seq.device, case.dtype)
    source = {"input_ids": src_seq.masked_fill(src_seq == models.PAD, case.n_vocab - 1)}
    source["attention_mask"] = (src_seq != models.PAD).long()
    options = {"num_beams": case.beam, "do_sample": False, "early_stopping": False, "use_cache": True}
    options |= {"min_new_tokens": case.new_tokens, "max_new_tokens": case.new_tokens}
    return Run(dict, {"decode": lambda: model.generate(**source, **options)})


def ctranslate2(case: DecodingCase, inputs: Inputs, dropout_p: float) -> Run:
    harness.imported("transformers")
    harness.imported("ctranslate2")
    src_seq = inputs.fixed["src_seq"]
    dtype = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[label(case.dtype)]
    task = (_words(src_seq), case.beam, case.new_tokens, src_seq.device.type, dtype, torch.get_num_threads())
    try:
        served = marian.Served(marian.build(case), *task)
    except RuntimeError as error:
        raise Refused(f"cannot translate here: {error}") from error
    return Run(dict, {"decode": served.translate})


def providers(device: torch.device) -> list[Provider]:
    return [
        incremental("reference", "reference"),
        incremental("default", None, default=True),
        without_cache("default, whole prefix", models.fused, fused_masks, without="the cache"),
        without_cache("plain PyTorch", models.plain, plain_masks),
        Provider("Hugging Face Marian", hugging_face, ours=False, compared=False),
        Provider("CTranslate2", ctranslate2, ours=False, compared=False),
    ]


BENCHMARK = harness.Benchmark(
    name="decoding",
    cases=cases_of(DecodingCase),
    directions=("decode",),
    rates=("token",),
    inputs=make_inputs,
    providers=providers,
    hide_host=False,
)


def test_decoding(benchmark: Any, timed: Any) -> None:
    benchmark(timed)
