"""How much faster than the public implementation's scheme a trained model translates, and whether it says the same.

    python examples/train_translation.py                    trains a small model on dates, in some minutes
    python benchmarks/translate_speed.py runs/dates

Beam search: 200 new dates with five beams, by the public Translator's scheme (one sentence at a time, every prefix
decoded anew; tests/generate/plain_search.py), by fastattn.models.Translator and by fastattn.generate.beam_search, in
batches. Greedy: a batch of 32 random sentences to 64 tokens, against decoding all of the batch's prefixes anew.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastattn import AttentionMask, FusedTransformer, generate
from fastattn.models import Translator

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "examples"), str(ROOT / "tests" / "generate")]

from plain_search import PlainTranslator  # noqa: E402
from translation.checkpoint import load_model  # noqa: E402
from translation.data import pad  # noqa: E402
from translation.dates import date_corpus  # noqa: E402
from translation.decoding import encode_source  # noqa: E402
from translation.tokens import BOS, EOS, PAD  # noqa: E402

BEAMS, LONGEST = 5, 40  # tokens of a translation, BOS included
NEVER = -1  # as the index of EOS: no sentence ends


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """The result of the faster of two calls, and its seconds."""
    found = []
    for _ in range(2):
        started = time.perf_counter()
        result = call()
        found.append((result, time.perf_counter() - started))
    return min(found, key=lambda pair: pair[1])


def compare_beams(run: Path, batch: int) -> None:
    model, tokenizer, settings = load_model(run / "model.pt")
    texts = [text for text, _ in date_corpus(1, 200, writings=2, seed=settings.seed + 1).val]
    sources = [torch.from_numpy(encode_source(tokenizer, text, settings.max_length)) for text in texts]
    by_length = sorted(range(len(sources)), key=lambda i: len(sources[i]))

    def batched(translate: Callable[[Tensor], list[Any]]) -> list[Any]:
        found: list[Any] = [None] * len(sources)
        for start in range(0, len(sources), batch):
            chosen = by_length[start : start + batch]
            for i, result in zip(chosen, translate(pad([sources[i].numpy() for i in chosen])), strict=True):
                found[i] = result
        return found

    options = (model, BEAMS, LONGEST, PAD, PAD, BOS, EOS)
    public, ours = PlainTranslator(*options), Translator(*options)
    limits = {"beam_size": BEAMS, "max_len": LONGEST - 1, "bos_idx": BOS, "eos_idx": EOS}
    expected, slow = timed(lambda: [public.translate_sentence(source[None]) for source in sources])
    print(f"public scheme: {slow:.2f} s for {len(sources)} sentences")
    found, seconds = timed(lambda: batched(ours.translate))
    equal = sum(a == b for a, b in zip(found, expected, strict=True))
    print(f"Translator, batches of {batch}: {seconds:.2f} s, {slow / seconds:.1f}x, {equal} sentences equal")
    found, seconds = timed(lambda: batched(lambda source: generate.beam_search(model, source, **limits)))
    equal = sum([BOS, *best.tokens, EOS] == b for (best, *_), b in zip(found, expected, strict=True))
    print(f"beam_search, batches of {batch}: {seconds:.2f} s, {slow / seconds:.1f}x, {equal} sentences equal")


@torch.no_grad()
def compare_greedy(layers: int, d_model: int, d_inner: int, heads: int, words: int) -> None:
    width = d_model // heads
    sizes = (words, words, PAD, PAD, d_model, d_model, d_inner, layers, heads, width, width)
    torch.manual_seed(0)
    model, src_seq = FusedTransformer(*sizes).eval(), torch.randint(3, words, (32, 30))

    def whole_prefixes() -> list[list[int]]:
        src_mask, trg_mask = model.src_mask(src_seq), AttentionMask(is_causal=True)
        enc_output, *_ = model.encoder(src_seq, src_mask)
        projected = model.decoder.project_encoder(enc_output)
        tokens = torch.full((32, 1), BOS)
        for _ in range(64):
            dec_output, *_ = model.decoder(tokens, trg_mask, enc_output, src_mask, enc_projected=projected)
            tokens = torch.cat([tokens, model.project(dec_output[:, -1]).argmax(-1, keepdim=True)], 1)
        return tokens[:, 1:].tolist()

    expected, slow = timed(whole_prefixes)
    found, seconds = timed(lambda: generate.greedy(model, src_seq, max_len=64, bos_idx=BOS, eos_idx=NEVER))
    equal = sum(a == b for a, b in zip(found, expected, strict=True))
    what = f"{layers}+{layers} layers d{d_model}, 32 sentences to 64 tokens"
    print(f"greedy, {what}: {slow:.2f} s and {seconds:.2f} s, {slow / seconds:.1f}x, {equal} sentences equal")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a run of examples/train_translation.py on dates")
    parser.add_argument("--batch", type=int, default=200, help="sentences translated together (default 200)")
    options = parser.parse_args()
    compare_beams(options.run, options.batch)
    compare_greedy(2, 96, 192, 4, 66)
    compare_greedy(3, 256, 1024, 4, 8000)


if __name__ == "__main__":
    main()
