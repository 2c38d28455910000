"""Greedy decoding, beam search and the Translator against plain searches that decode every prefix again."""

from __future__ import annotations

from typing import Any

import plain_search
import pytest
import torch
from search_cases import BOS, EOS, PAD, make_model, make_source

from fastattn import generate
from fastattn.models import Translator

VARIANTS: list[dict[str, Any]] = [
    {},
    {"norm_first": True, "n_head_kv": 2, "activation": "swiglu"},
    {"pack_padding": True, "trg_emb_prj_weight_sharing": True},
]


@pytest.mark.parametrize("max_len", [15, 1])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_greedy(variant: dict[str, Any], max_len: int) -> None:
    model, src_seq = make_model(**variant), make_source()
    found = generate.greedy(model, src_seq, max_len=max_len, bos_idx=BOS, eos_idx=EOS)
    for i, tokens in enumerate(found):
        assert tokens == plain_search.greedy(plain_search.of_model(model, src_seq[i : i + 1]), max_len, BOS, EOS)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_beam_search(variant: dict[str, Any]) -> None:
    model, src_seq = make_model(**variant), make_source()
    plain = [plain_search.of_model(model, sentence[None]) for sentence in src_seq]
    for length_penalty, max_len in ((0.7, 12), (0.0, 12), (2.0, 12), (-0.5, 12), (0.7, 1)):
        options = {"beam_size": 4, "max_len": max_len, "bos_idx": BOS, "eos_idx": EOS}
        options |= {"length_penalty": length_penalty, "n_best": 3}
        together = generate.beam_search(model, src_seq, **options)
        for i, found in enumerate(together):
            expected = plain_search.beam_search(plain[i], **options)
            assert [h.tokens for h in found] == [tokens for tokens, _ in expected], options
            torch.testing.assert_close([h.score for h in found], [score for _, score in expected], rtol=1e-4, atol=1e-4)
            alone = generate.beam_search(model, src_seq[i : i + 1], **options)[0]
            assert [h.tokens for h in alone] == [h.tokens for h in found], options


@pytest.mark.parametrize("max_seq_len", [2, 3, 14])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_translator(variant: dict[str, Any], max_seq_len: int) -> None:
    """It finds what the public class finds with an equal model."""
    model, src_seq = make_model(**variant), make_source()
    options = (4, max_seq_len, PAD, PAD, BOS, EOS)
    translator, public = Translator(model, *options), plain_search.PlainTranslator(make_model(**variant), *options)
    found = translator.translate(src_seq)
    assert found == [public.translate_sentence(sentence[None]) for sentence in src_seq]
    assert found == [translator.translate_sentence(sentence[None]) for sentence in src_seq]
