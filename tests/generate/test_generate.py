"""Greedy decoding, beam search, sampling and the Translator against plain searches that decode every prefix anew."""

from __future__ import annotations

from typing import Any

import plain_search
import pytest
import torch
from torch import Tensor

from fastattn import FusedTransformer, generate
from fastattn.models import Translator

PAD, BOS, EOS = 0, 1, 2
VARIANTS: list[dict[str, Any]] = [
    {},
    {"norm_first": True, "n_head_kv": 2, "activation": "swiglu"},
    {"pack_padding": True, "trg_emb_prj_weight_sharing": True},
]


def make_model(vocabulary: int = 11, **variant: Any) -> FusedTransformer:
    """Random weights, large enough for the next token to depend on all before, for beams to differ and to end."""
    torch.manual_seed(7)
    sizes = dict(d_word_vec=32, d_model=32, d_inner=48, n_layers=2, n_head=4, d_k=8, d_v=8, n_position=40)
    shared = dict(trg_emb_prj_weight_sharing=False, emb_src_trg_weight_sharing=False)
    model = FusedTransformer(vocabulary, vocabulary, PAD, PAD, **sizes, **(shared | variant))
    with torch.no_grad():
        model.decoder.trg_word_emb.weight.normal_(std=0.7)
        model.trg_word_prj.weight.normal_(std=1.7 if model.scale_prj else 0.5)
        model.trg_word_prj.weight[EOS] *= 1.5
    return model.eval()


def make_source(batch: int = 5, length: int = 9, vocabulary: int = 11) -> Tensor:
    """Sentences of different lengths: padding behind, in one sentence also before and between; one is all padding."""
    src_seq = torch.randint(3, vocabulary, (batch, length))
    for i in range(1, batch):
        src_seq[i, length - i :] = PAD
    src_seq[1, :2] = PAD
    src_seq[1, 4] = PAD
    if batch > 4:
        src_seq[4] = PAD
    return src_seq


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_step_is_the_last_position_of_forward(variant: dict[str, Any]) -> None:
    model, src_seq, trg_seq = make_model(**variant), make_source(), torch.randint(3, 11, (5, 12))
    with torch.no_grad():
        full = model(src_seq, trg_seq).unflatten(0, (5, 12))
        cache = model.start_decoding(src_seq, 1, 12)
        steps = [model.next_logits(trg_seq[:, t : t + 1], cache) for t in range(12)]
    torch.testing.assert_close(torch.cat(steps, 1), full, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_greedy(variant: dict[str, Any]) -> None:
    model, src_seq = make_model(**variant), make_source()
    found = generate.greedy(model, src_seq, max_len=15, bos_idx=BOS, eos_idx=EOS)
    for i, tokens in enumerate(found):
        assert tokens == plain_search.greedy(plain_search.of_model(model, src_seq[i : i + 1]), 15, BOS, EOS)


@pytest.mark.parametrize("length_penalty", [0.7, 0.0, 2.0, -0.5])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_beam_search(variant: dict[str, Any], length_penalty: float) -> None:
    model, src_seq = make_model(**variant), make_source()
    options = {"beam_size": 4, "max_len": 12, "bos_idx": BOS, "eos_idx": EOS}
    options |= {"length_penalty": length_penalty, "n_best": 3}
    together = generate.beam_search(model, src_seq, **options)
    for i, found in enumerate(together):
        expected = plain_search.beam_search(plain_search.of_model(model, src_seq[i : i + 1]), **options)
        assert [hypothesis.tokens for hypothesis in found] == [tokens for tokens, _ in expected]
        torch.testing.assert_close([h.score for h in found], [score for _, score in expected], rtol=1e-4, atol=1e-4)
        alone = generate.beam_search(model, src_seq[i : i + 1], **options)[0]
        assert [h.tokens for h in alone] == [h.tokens for h in found]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_translator(variant: dict[str, Any]) -> None:
    model, src_seq = make_model(**variant), make_source()
    translator = Translator(model, 4, 14, PAD, PAD, BOS, EOS)
    together = translator.translate(src_seq)
    unscaled = model.d_model**0.5 if model.scale_prj else 1.0
    for i, found in enumerate(together):
        log_probabilities = plain_search.of_model(model, src_seq[i : i + 1], unscaled)
        assert found == plain_search.public_translate(log_probabilities, 4, 14, BOS, EOS)
        assert found == translator.translate_sentence(src_seq[i : i + 1])


@pytest.mark.parametrize("max_seq_len", [3, 14])
@pytest.mark.parametrize("variant", [variant for variant in VARIANTS if "pack_padding" not in variant], ids=str)
def test_translator_is_the_public_one(variant: dict[str, Any], max_seq_len: int) -> None:
    """The public class drives the model as it is, and finds the same."""
    model, src_seq = make_model(**variant), make_source()
    options = (3, max_seq_len, PAD, PAD, BOS, EOS)
    public = plain_search.PlainTranslator(model, *options)
    assert Translator(model, *options).translate(src_seq) == [public.translate_sentence(s[None]) for s in src_seq]
