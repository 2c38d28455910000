"""Translation with the whole encoder-decoder, greedy and by beam search, against what a user would use instead.

    python benchmarks/report.py --only decoding

Every sentence gets the same number of tokens. tokens/s counts those of the best translations. The logits of the next
token are compared at every step of a given prefix. CTranslate2 has the same model, exported. Hugging Face's Marian has
the same shape but other random weights. Of these two only the speed is compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import exported
import harness
import marian
import models  # before plain_search: it extends sys.path
import plain_search
import torch
from cases import DecodingCase, label
from harness import Inputs, Provider, Refused, Run
from torch import Tensor, nn

from fastattn import accelerate, generate, get_pad_mask, get_subsequent_mask, use_backend

BOS = 2
NEVER = -1  # as the index of EOS: no sentence ends
MAX_ROWS = 64  # sentences times beams that are decoded without a cache; more take minutes


def make_inputs(case: DecodingCase, device: torch.device) -> Inputs:
    inputs = models.make_inputs(case, device, _positions(case))
    shape = case.batch, case.new_tokens
    prefix = torch.randint(1, case.n_vocab, shape, generator=harness.seeded("cpu")).to(device)
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


def whole_prefix(case: DecodingCase, inputs: Inputs, dropout_p: float) -> Run:
    """The public model, which has no cache, so each step decodes the whole prefix again: greedily the batch at once,
    with beams one sentence at a time, as the public implementation's Translator does it."""
    if case.batch * case.beam > MAX_ROWS:
        raise Refused(f"without a cache {case.batch} sentences with {case.beam} beams take minutes")
    model, src_seq, prefix = _load(models.plain, case, inputs), inputs.fixed["src_seq"], inputs.fixed["prefix"]
    scale = case.d_model**-0.5  # of the logits; the projection shares its weight with the embedding
    options = (models.PAD, models.PAD, BOS, NEVER)
    translator = plain_search.PlainTranslator(model, case.beam, case.new_tokens + 1, *options).to(src_seq.device)

    def decoder() -> Callable[[Tensor], Tensor]:
        """Encodes the source. Returns the function from tokens to the logits of the next token."""
        src_mask = get_pad_mask(src_seq, models.PAD)
        encoded, *_ = model.encoder(src_seq, src_mask)

        def logits(tokens: Tensor) -> Tensor:
            decoded, *_ = model.decoder(tokens, get_subsequent_mask(tokens), encoded, src_mask)
            return model.trg_word_prj(decoded[:, -1]) * scale

        return logits

    @torch.no_grad()
    def results() -> dict[str, Tensor]:
        logits = decoder()
        return {"logits": torch.stack([logits(prefix[:, : t + 1]) for t in range(case.new_tokens)])}

    @torch.no_grad()
    def decode() -> Any:
        if case.beam > 1:
            return [translator.translate_sentence(sentence[None]) for sentence in src_seq]
        logits, tokens = decoder(), torch.full_like(src_seq[:, :1], BOS)
        for _ in range(case.new_tokens):
            tokens = torch.cat([tokens, logits(tokens).argmax(-1, keepdim=True)], 1)
        return tokens

    return Run(results, {"decode": decode})


def _words(src_seq: Tensor) -> list[list[int]]:
    return [[word for word in sentence if word != models.PAD] for sentence in src_seq.tolist()]


def accelerated(case: DecodingCase, inputs: Inputs, dropout_p: float) -> Run:
    """fastattn.generate on an accelerated Marian."""
    harness.imported("transformers")
    src_seq = inputs.fixed["src_seq"]
    model = marian.build(case).to(src_seq.device, case.dtype)
    accelerate(model)
    source = src_seq.masked_fill(src_seq == models.PAD, model.config.pad_token_id)
    return Run(dict, {"decode": lambda: _generate(model, source, case)})


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
    harness.imported("ctranslate2")
    src_seq = inputs.fixed["src_seq"]
    dtype = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[label(case.dtype)]
    task = (_words(src_seq), case.beam, case.new_tokens, src_seq.device.type, dtype, torch.get_num_threads())
    try:
        translate = exported.ctranslate2_process(_load(models.fused, case, inputs), *task)
    except (RuntimeError, ValueError) as error:
        raise Refused(f"cannot translate here: {error}") from error
    return Run(dict, {"decode": translate})


def providers(device: torch.device) -> list[Provider]:
    return [
        incremental("reference", "reference"),
        incremental("default", None, default=True),
        Provider("plain PyTorch", whole_prefix, ours=False),
        Provider("Hugging Face Marian", hugging_face, ours=False, compared=False),
        Provider("Hugging Face Marian, accelerated", accelerated, compared=False),
        Provider("CTranslate2", ctranslate2, ours=False, compared=False),
    ]


BENCHMARK = harness.Benchmark(
    name="decoding",
    case_type=DecodingCase,
    rates=("token",),
    inputs=make_inputs,
    providers=providers,
    directions=("decode",),
    hide_host=False,
)
