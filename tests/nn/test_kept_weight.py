"""What decoding keeps of weights for the next generation is never used after one of them has changed."""

import copy

import torch

from fastattn import FusedTransformer
from fastattn.nn.kept_weight import _NAME


def test_steps_of_decoding_see_every_change():
    torch.manual_seed(0)
    sizes = {"d_word_vec": 16, "d_model": 16, "d_inner": 32, "n_layers": 2, "n_head": 2, "d_k": 8, "d_v": 8}
    model = FusedTransformer(20, 20, 0, 0, **sizes).eval()

    @torch.no_grad()
    def decoded(model: FusedTransformer) -> torch.Tensor:
        cache = model.start_decoding(torch.arange(2, 8)[None], 1, 3)
        return torch.stack([model.next_logits(torch.tensor([[token]]), cache) for token in (2, 5)])

    decoded(model)
    kept = model.decoder.layer_stack[0].enc_attn.__dict__[_NAME]
    before = decoded(model)
    assert model.decoder.layer_stack[0].enc_attn.__dict__[_NAME] is kept
    for name, p in model.decoder.layer_stack.named_parameters():
        p.data.copy_(p.data + torch.randn_like(p))
        found = decoded(model)
        assert not torch.equal(found, before), name
        torch.testing.assert_close(found, decoded(copy.deepcopy(model)))
        before = found
    model.train()
    assert not any(_NAME in module.__dict__ for module in model.modules())
