"""Translation with the whole encoder-decoder, greedy and by beam search, against what a user would use instead.

    python benchmarks/report.py --only decoding

Every sentence gets the same number of tokens. tokens/s counts those of the best translations. The logits of the next
token are compared at every step of a given prefix. CTranslate2 has the same model, exported. Hugging Face's Marian has
the same shape but other random weights. The public model decodes without a cache. Of these only the speed is compared.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import bench_accelerate
import harness
import models  # before plain_search: it extends sys.path
import plain_search
import timing
import torch
from cases import DecodingCase
from harness import Benchmark, Inputs, Provider, Refused, Run
from result_files import PLAIN
from torch import Tensor, nn

from fastattn import accelerate, generate, use_backend
from fastattn.generate import kept_graphs

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
        @use_backend(backend)
        def results() -> dict[str, Tensor]:
            cache = model.start_decoding(src_seq, 1, case.new_tokens)
            return {"logits": torch.stack([model.next_logits(token[:, None], cache)[:, 0] for token in prefix.T])}

        timed = {"decode": use_backend(backend)(lambda: _generate(model, src_seq, case))}
        return Run(results, timed, notes, partial(step_on_the_gpu, model, src_seq.device))

    return Provider(name, make)


def step_on_the_gpu(model: nn.Module, device: torch.device) -> dict[str, Any]:
    """The GPU's time of a step in the middle of a sentence: of the graph that was kept last, with two fills."""
    if model not in kept_graphs._kept:
        return {}
    *_, (search, work) = kept_graphs._kept[model][1].values()
    cache = search.cache

    def step() -> None:
        cache.position.fill_(cache.capacity // 2)
        cache.lengths.fill_(cache.capacity // 2 + 1)
        work.replay()

    return {"step_device_ms": timing.measure(step, device, 1.0).median_ms}


def whole_prefix(case: DecodingCase, inputs: Inputs, dropout_p: float) -> Run:
    """The public model has no cache, so each step decodes the whole prefix again, one sentence at a time, as the public
    implementation's Translator does it."""
    if case.batch * case.beam > MAX_ROWS:
        raise Refused(f"without a cache {case.batch} sentences with {case.beam} beams take minutes")
    model, src_seq = _load(models.plain, case, inputs), inputs.fixed["src_seq"]
    options = case.beam, case.new_tokens + 1, models.PAD, BOS, NEVER
    return Run(dict, {"decode": lambda: [plain_search.translate(model, one[None], *options) for one in src_seq]})


def marian(case: DecodingCase, device: torch.device) -> Any:
    return bench_accelerate.transformers_model("Marian", case, 0.0, _positions(case) + 1).to(device, case.dtype).eval()


def accelerated(case: DecodingCase, inputs: Inputs, dropout_p: float) -> Run:
    """fastattn.generate on an accelerated Marian."""
    src_seq = inputs.fixed["src_seq"]
    model = marian(case, src_seq.device)
    accelerate(model)
    return Run(dict, {"decode": lambda: _generate(model, src_seq, case)})


def hugging_face(case: DecodingCase, inputs: Inputs, dropout_p: float) -> Run:
    src_seq = inputs.fixed["src_seq"]
    model = marian(case, src_seq.device)
    source = {"input_ids": src_seq, "attention_mask": (src_seq != models.PAD).long()}
    options = {"num_beams": case.beam, "do_sample": False, "early_stopping": False, "use_cache": True}
    options |= {"min_new_tokens": case.new_tokens, "max_new_tokens": case.new_tokens}
    return Run(dict, {"decode": lambda: model.generate(**source, **options)})


def ctranslate2(case: DecodingCase, inputs: Inputs, dropout_p: float) -> Run:
    """The same model, exported."""
    src_seq, n = inputs.fixed["src_seq"], case.new_tokens
    package, words = harness.imported("ctranslate2"), [f"w{i}" for i in range(case.n_vocab)]
    from fastattn.integrations.ctranslate2 import export  # which needs the package

    options = {"compute_type": str(case.dtype)[6:], "inter_threads": 1, "intra_threads": torch.get_num_threads()}
    limits = {"beam_size": case.beam, "min_decoding_length": n, "max_decoding_length": n, "max_batch_size": 0}
    sentences = [[words[i] for i in sentence if i != models.PAD] for sentence in src_seq.tolist()]

    def translate() -> None:
        if any(len(found.hypotheses[0]) != n for found in translator.translate_batch(sentences, **limits)):
            raise RuntimeError("some translations are shorter")

    with tempfile.TemporaryDirectory() as parent:
        # It needs a word that ends a sentence: padding, which never occurs.
        indices = {"bos_idx": BOS, "eos_idx": models.PAD, "unk_idx": 1}
        folder = str(Path(parent, "model"))
        export(_load(models.fused, case, inputs), folder, words, words, **indices)
        try:
            translator = package.Translator(folder, src_seq.device.type, **options)
            translate()
        except (RuntimeError, ValueError) as error:
            raise Refused(f"cannot translate here: {error}") from error
    return Run(dict, {"decode": translate})


def providers(device: torch.device) -> list[Provider]:
    return [
        incremental("reference", "reference"),
        incremental("default", None, default=True),
        Provider(PLAIN, whole_prefix, ours=False, compared=False),
        Provider("Hugging Face Marian", hugging_face, ours=False, compared=False),
        Provider("Hugging Face Marian, accelerated", accelerated, compared=False),
        Provider("CTranslate2", ctranslate2, ours=False, compared=False),
    ]


BENCHMARKS = (
    Benchmark(
        "decoding",
        "FLOPs: each new token of each beam is multiplied with the decoder's weights once, each source token with the "
        "encoder's; bytes: at each step the decoder's weights, and the keys and values of all beams and of the source",
        ("token",),
        make_inputs,
        providers,
        directions=("decode",),
        hide_host=False,
    ),
)
